// Bytes alive on one pipeline rank of the chosen replica, over the time of its schedule; the other ranks as thin lines.

const POINT_WIDTH = 7;
const MEMORY_HEIGHT = 230;
const HELD = [
  ["gradients", "gK/gV"],
  ["keys-values", "K/V"],
  ["activations", "activations"],
  ["logits", "logits"],
  ["communication", "communication"],
  ["working", "in work"],
];
// In the payload holders stand in another order: activations, K/V, gK/gV, logits, communication, in work.
const STACK = [2, 1, 0, 3, 4, 5];

const memoryCurves = new Map();
function memoryOf(rank) {
  const key = `${state.replica}/${rank}`;
  if (!memoryCurves.has(key)) memoryCurves.set(key, readMemory(rank));
  return memoryCurves.get(key);
}

// Steps {start, stop, held: bytes bottom to top, total, op}.
function readMemory(rank) {
  const { memory, levelBytes } = data.replicas[state.replica];
  const { stride, points } = memory[rank];
  const operations = timeline().rows[rank];
  const steps = [];
  for (let i = 0; i < points.length; i += POINT_WIDTH) {
    const first = (i / POINT_WIDTH) * stride;
    const next = operations[first + stride];
    const held = STACK.map((column) => points[i + 1 + column] * levelBytes);
    const total = held.reduce((a, b) => a + b, 0);
    steps.push({ start: operations[first].start, stop: next?.start ?? operations.at(-1).stop, held, total, op: operations[points[i]] });
  }
  return steps;
}

const memoryTop = () => {
  const peaks = data.replicas[state.replica].memory.flatMap(({ peaks }) => Object.values(peaks).map(([, size]) => size));
  return Math.max(1, ...peaks);
};
const largestRank = () => {
  const peak = ({ peaks }) => Math.max(0, ...Object.values(peaks).map(([, size]) => size));
  const sizes = data.replicas[state.replica].memory.map(peak);
  return sizes.indexOf(Math.max(...sizes));
};

function paintMemory(chart) {
  const c = chart.context;
  const [top, bottom] = [12, MEMORY_HEIGHT - AXIS_HEIGHT - 10];
  const most = memoryTop() * 1.06;
  const y = (size) => bottom - (size / most) * (bottom - top);
  paintScale(chart, most, y);
  const seen = (step) => step.stop >= time.start && step.start <= time.stop;
  let drawn = 0;
  chart.clipped(top - 4, MEMORY_HEIGHT, () => {
    for (const step of memoryOf(state.rank).filter(seen)) {
      paintStep(chart, step, y);
      drawn++;
    }
    data.replicas[state.replica].rows.forEach((_, rank) => {
      if (rank !== state.rank) paintOutline(chart, memoryOf(rank).filter(seen), y);
    });
    for (const op of timeline().rows[state.rank]) {
      if (op.stop < time.start || op.start > time.stop) continue;
      c.fillStyle = colour(op.isDummy ? "gap" : op.colour);
      c.fillRect(chart.x(op.start), bottom + 2, Math.max(0.5, chart.x(op.stop) - chart.x(op.start)), 7);
    }
    paintPeaks(chart, y);
  });
  chart.axis(MEMORY_HEIGHT - AXIS_HEIGHT, timeLabel, 100 / data.ticks);
  report("memory-points", drawn);
}

function paintScale(chart, most, y) {
  const unit = 1024 ** Math.floor(Math.log(most) / Math.log(1024));
  const step = niceStep(most / unit / 4) * unit;
  for (let size = 0; size <= most; size += step) {
    chart.context.fillStyle = colour("rule");
    chart.context.fillRect(GUTTER, Math.round(y(size)), chart.plotWidth, 1);
    chart.text(size ? bytes(size) : "0", GUTTER - 8, y(size), { fill: colour("faint"), align: "right" });
  }
}

function paintStep(chart, step, y) {
  // Whole pixels: neighbours must not leave a seam.
  const ratio = devicePixelRatio || 1;
  const whole = (value) => Math.round(chart.x(value) * ratio) / ratio;
  const x = whole(step.start);
  const width = Math.max(1 / ratio, whole(step.stop) - x);
  let below = 0;
  step.held.forEach((size, i) => {
    if (!size) return;
    chart.context.fillStyle = colour(HELD[i][0]);
    chart.context.fillRect(x, y(below + size), width, y(below) - y(below + size));
    below += size;
  });
}

function paintOutline(chart, steps, y) {
  const c = chart.context;
  c.strokeStyle = colour("faint");
  c.globalAlpha = 0.55;
  c.lineWidth = 1;
  c.beginPath();
  for (const step of steps) {
    c.lineTo(chart.x(step.start), y(step.total));
    c.lineTo(chart.x(step.stop), y(step.total));
  }
  c.stroke();
  c.globalAlpha = 1;
}

const peaksOf = (rank) =>
  Object.entries(data.replicas[state.replica].memory[rank].peaks).map(([phase, [index, size, held]]) => {
    return { phase, size, held: STACK.map((column) => held[column]), op: timeline().rows[rank][index] };
  });

function paintPeaks(chart, y) {
  const c = chart.context;
  for (const { phase, size, op } of peaksOf(state.rank)) {
    c.beginPath();
    c.arc(chart.x((op.start + op.stop) / 2), y(size), 5, 0, 7);
    c.fillStyle = colour({ A: "AF", B: "BB", C: "CB" }[phase]);
    c.fill();
    c.strokeStyle = colour("ink");
    c.lineWidth = 1.5;
    c.stroke();
  }
}

function describeMemory(chart, x) {
  const at = chart.value(x);
  const step = memoryOf(state.rank).find((s) => s.start <= at && at < s.stop);
  if (!step || x < GUTTER) return null;
  const held = HELD.map(([, text], i) => `${text}: ${bytes(step.held[i])}`).reverse();
  const tip = [`${bytes(step.total)} at ${step.op.name}`, ...held, `and ${bytes(data.stateBytes)} of state`];
  return { tip, focus: { replica: state.replica, microbatch: step.op.microbatch } };
}

function showMemoryWords() {
  element("memory-of").textContent = `pipeline rank ${state.rank}${data.replicas.length > 1 ? ` of replica ${state.replica}` : ""}`;
  const others = data.pipelineSize > 1 ? " Thin lines are the other pipeline ranks." : "";
  element("memory-note").textContent =
    `Predicted bytes alive beyond ${bytes(data.stateBytes)} of weights, gradients and optimizer state; one forward and ` +
    `backward. Communication: messages between stages and K/V that go round, not a library's own buffers.${others}`;
  const parts = HELD.map(([name, text]) => [colour(name), text]).reverse();
  const peaks = peaksOf(state.rank).map(({ phase, size }) => [colour({ A: "AF", B: "BB", C: "CB" }[phase]), `peak in ${phase}: ${bytes(size)}`, "dot"]);
  showLegend("memory-legend", [...parts, ...peaks]);
  if (data.pipelineSize === 1) return;
  const buttons = timeline().rows.map((_, rank) => {
    const made = button(String(rank), `memory of pipeline rank ${rank}`, () => selectRank(rank));
    made.setAttribute("aria-pressed", rank === state.rank);
    return made;
  });
  element("memory-tools").replaceChildren(Object.assign(document.createElement("span"), { textContent: "rank" }), ...buttons);
}

// What is alive at the peak of each phase on each pipeline rank of the chosen replica.
function showPeakTable() {
  const cells = (tag, texts) => {
    const line = document.createElement("tr");
    line.append(...texts.map((text) => Object.assign(document.createElement(tag), { textContent: text })));
    return line;
  };
  const names = HELD.map(([, text]) => text).reverse();
  const lines = timeline().rows.flatMap((_, rank) =>
    peaksOf(rank).map(({ phase, size, held, op }) =>
      cells("td", [String(rank), phase, op.name, bytes(size), ...held.map((part) => (part ? bytes(part) : "")).reverse()]),
    ),
  );
  element("memory-peaks").replaceChildren(cells("th", ["rank", "phase", "operation", "peak", ...names]), ...lines);
  report("memory-peaks", lines.length);
}

function startMemory() {
  new Chart("memory-canvas", time, { height: () => MEMORY_HEIGHT, paint: paintMemory, lines: describeMemory });
  redraws.push(showMemoryWords, showPeakTable);
}
