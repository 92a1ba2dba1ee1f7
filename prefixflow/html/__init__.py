"""`prefixflow plan --html`: one page that shows a plan and needs nothing but a browser."""

from __future__ import annotations

from prefixflow.html.page import PageText, write_page
from prefixflow.html.payload import PlannedStep

__all__ = ["PageText", "PlannedStep", "write_page"]
