// A canvas with a left gutter for names, a right one for figures, and a horizontal axis that can be moved and zoomed.

const GUTTER = 112;
const MARGIN = 92;

class View {
  // What part [start, stop) of [0, end) is seen; charts that share a view move together.
  constructor(end, smallest) {
    Object.assign(this, { end, smallest, start: 0, stop: end, charts: [] });
  }
  show(start, stop) {
    const size = Math.min(this.end, Math.max(this.smallest, stop - start));
    this.start = Math.min(Math.max(0, start), this.end - size);
    this.stop = this.start + size;
    this.charts.forEach((chart) => chart.draw());
  }
  move(by) {
    this.show(this.start + by, this.stop + by);
  }
  zoom(factor, at = (this.start + this.stop) / 2) {
    const size = Math.max(this.smallest, (this.stop - this.start) * factor);
    const start = at - ((at - this.start) / (this.stop - this.start)) * size;
    this.show(start, start + size);
  }
  tools(id) {
    const all = [
      button("−", "zoom out", () => this.zoom(1.6)),
      button("+", "zoom in", () => this.zoom(1 / 1.6)),
      button("all", "see all", () => this.show(0, this.end)),
    ];
    element(id).append(...all);
  }
}

class Chart {
  // `paint(chart)` draws; `lines(chart, x, y)` gives {tip, focus} of a place, or nothing.
  constructor(id, view, { height, paint, lines, onVertical }) {
    Object.assign(this, { canvas: element(id), view, height, paint, lines, onVertical });
    this.context = this.canvas.getContext("2d");
    view.charts.push(this);
    redraws.push(() => this.draw());
    this.listen();
  }
  get width() {
    return this.canvas.clientWidth;
  }
  get plotWidth() {
    return Math.max(1, this.width - GUTTER - MARGIN);
  }
  x(value) {
    return GUTTER + ((value - this.view.start) / (this.view.stop - this.view.start)) * this.plotWidth;
  }
  value(x) {
    return this.view.start + ((x - GUTTER) / this.plotWidth) * (this.view.stop - this.view.start);
  }
  draw() {
    const ratio = devicePixelRatio || 1;
    const height = this.height();
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.font(12);
    this.context.textBaseline = "middle";
    this.paint(this);
  }
  font(size, weight = 400) {
    this.context.font = `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;
  }
  text(text, x, y, { fill = colour("ink"), align = "left", most = Infinity } = {}) {
    const c = this.context;
    let shown = text;
    while (shown.length > 1 && c.measureText(shown).width > most) shown = `${shown.slice(0, shown.length - 2)}…`;
    c.fillStyle = fill;
    c.textAlign = align;
    c.fillText(shown, x, y);
  }
  // Draw inside the plot only: zoomed items reach beyond it.
  clipped(top, height, paint) {
    const c = this.context;
    c.save();
    c.beginPath();
    c.rect(GUTTER, top, this.plotWidth, height);
    c.clip();
    paint();
    c.restore();
  }
  // Ticks of the horizontal axis at `y`, their texts made by `format(value, step)`.
  axis(y, format, unit) {
    const step = niceStep((unit * (this.view.stop - this.view.start)) / Math.max(2, this.plotWidth / 110)) / unit;
    const first = Math.max(0, Math.ceil(this.view.start / step - 1e-9));
    for (let i = first; i * step <= this.view.stop * (1 + 1e-9); i++) {
      const x = this.x(i * step);
      this.context.fillStyle = colour("rule");
      this.context.fillRect(x, y, 1, 5);
      this.text(format(i * step, step), x, y + 14, { fill: colour("faint"), align: "center" });
    }
  }
  listen() {
    const canvas = this.canvas;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.hover(event);
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      showTip(event, null);
      this.view.move((-dx / this.plotWidth) * (this.view.stop - this.view.start));
      this.onVertical?.(-dy);
      drag = { x: event.clientX, y: event.clientY, moved: true };
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.click(event);
      drag = null;
    });
    canvas.addEventListener("pointerleave", (event) => {
      showTip(event, null);
      setFocus(null);
    });
    canvas.addEventListener("dblclick", () => this.view.show(0, this.view.end));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return this.lines?.(this, event.clientX - box.left, event.clientY - box.top);
  }
  hover(event) {
    const found = this.place(event);
    showTip(event, found?.tip ?? null);
    setFocus(found?.focus ?? null);
  }
  click(event) {
    const found = this.place(event);
    found?.select?.();
    if (found?.focus) hold(found.focus);
  }
  wheel(event) {
    const size = this.view.stop - this.view.start;
    if (event.ctrlKey || event.metaKey) {
      this.view.zoom(Math.exp(event.deltaY * 0.004), this.value(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.view.move(((event.deltaX || event.deltaY) / this.plotWidth) * size);
    } else return;
    event.preventDefault();
  }
  key(event) {
    const size = this.view.stop - this.view.start;
    const actions = {
      "+": () => this.view.zoom(1 / 1.6),
      "=": () => this.view.zoom(1 / 1.6),
      "-": () => this.view.zoom(1.6),
      0: () => this.view.show(0, this.view.end),
      ArrowLeft: () => this.view.move(-size / 8),
      ArrowRight: () => this.view.move(size / 8),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    actions[event.key]();
    event.preventDefault();
  }
}

// 1, 2 or 5 times a power of ten, at least `rough`.
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((m) => m * power >= rough * 0.999) * power;
}

function hatch(context) {
  const tile = document.createElement("canvas");
  const ratio = devicePixelRatio || 1;
  tile.width = tile.height = 6 * ratio;
  const c = tile.getContext("2d");
  c.scale(ratio, ratio);
  c.strokeStyle = colour("gap");
  c.lineWidth = 1;
  c.beginPath();
  for (const at of [-6, 0, 6]) {
    c.moveTo(at - 1, 7);
    c.lineTo(at + 7, -1);
  }
  c.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
