"""Long prompts with answers that a program can check, for the demo.

A task is a list of made-up people and the request for a short story about one of them that tells where this person
lives, what the job is and which pet there is. The list makes the prompt long, and all answers to it share it. The reward
says how many of these three facts an answer gets right, and a little for telling one at all, so a small model scores
something between 0 and 1. The first words of the answer are given, which keeps the model to the point.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

# fmt: off
NAMES = (
    "Ada", "Bruno", "Carla", "Dario", "Elsa", "Felix", "Greta", "Hugo", "Ines",
    "Jonas", "Kira", "Luca", "Mila", "Nils", "Olga", "Pavel", "Rosa", "Sven",
    "Tara", "Ugo", "Vera", "Walter", "Xenia", "Yann", "Zora",
)
# fmt: on
CITIES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens")
JOBS = ("baker", "pilot", "nurse", "painter", "farmer", "teacher")
PETS = ("cat", "dog", "parrot", "rabbit", "turtle", "goldfish")
NUM_PEOPLE = 22

SYSTEM = "You tell short stories about people on a list, true to what the list says."


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt (`system`, `user`, and the `opening` of the answer) and the facts, one of each kind, to be told."""

    id: str
    system: str
    user: str
    opening: str
    facts: tuple[str, str, str]

    def reward(self, answer: str) -> float:
        """Mean over the kinds of fact: 1 for the right one, 0.2 for one that is wrong, 0 for none or several."""
        words = set(re.findall(r"\w+", answer))
        points = 0.0
        for fact, kind in zip(self.facts, (CITIES, JOBS, PETS), strict=True):
            named = words.intersection(kind)
            points += 1.0 if named == {fact} else 0.2 if len(named) == 1 else 0.0
        return points / len(self.facts)

    def chatml(self) -> str:
        """The prompt up to where the model goes on."""
        turns = (("system", self.system), ("user", self.user))
        asked = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        return f"{asked}<|im_start|>assistant\n{self.opening}"


def make_task(number: int) -> Task:
    """Task `number`; the same number always gives the same task."""
    rng = random.Random(number)
    people = {name: (rng.choice(CITIES), rng.choice(JOBS), rng.choice(PETS)) for name in rng.sample(NAMES, NUM_PEOPLE)}
    lines = [f"{name} lives in {city}, works as a {job} and has a {pet}." for name, (city, job, pet) in people.items()]
    name = rng.choice(sorted(people))
    user = (
        "Here is a list of people.\n\n"
        + "\n".join(lines)
        + f"\n\nWrite a short story about {name}. Begin with where {name} lives, what {name} works as and which pet "
        f"{name} has."
    )
    return Task(f"task-{number}", SYSTEM, user, f"{name} lives in", people[name])
