// The schedule of one replica: a lane for each pipeline rank, cut into one for each model chunk it holds.

const OPERATION_WIDTH = 4;
const AXIS_HEIGHT = 26;
const PHASES = { AF: "A: prefix forward, K/V cached", BF: "B: suffix forward", BB: "B: suffix backward, adds gK/gV", CB: "C: delayed prefix backward" };

const time = new View(data.ticks, 20);
const timelines = new Map();

// Operations of the chosen replica, read from the payload once: rows of {stage, chunk, kind, microbatch, start, stop}.
function timeline() {
  if (!timelines.has(state.replica)) timelines.set(state.replica, readTimeline(data.replicas[state.replica]));
  return timelines.get(state.replica);
}

function readTimeline({ mb, rows }) {
  const readers = mb.map(() => []);
  mb.forEach(([, , reads], m) => reads.forEach((r) => readers[r].push(m)));
  const read = (flat, rank) => {
    const operations = [];
    let at = 0;
    for (let i = 0; i < flat.length; i += OPERATION_WIDTH) {
      const [code, microbatch, idle, takes] = flat.slice(i, i + OPERATION_WIDTH);
      const chunk = code >> 1;
      const kind = code & 1 ? "B" : "F";
      const start = at + idle;
      at = start + takes;
      const phase = !readers[microbatch].length ? "B" : kind === "F" ? "A" : "C";
      const stage = chunk * data.pipelineSize + rank;
      const isDummy = mb[microbatch][0] === 0;
      operations.push({ name: `${stage}${kind}${microbatch}`, stage, chunk, kind, microbatch, start, stop: at, idle, isDummy, colour: phase + kind });
    }
    return operations;
  };
  return { mb, readers, rows: rows.map(read) };
}

const laneOf = () => {
  const chunks = data.numChunks;
  const height = data.pipelineSize <= 4 ? 34 : data.pipelineSize <= 8 ? 28 : 20;
  return { height: Math.max(height, 21 * chunks), space: data.pipelineSize <= 8 ? 8 : 4 };
};
const timelineHeight = () => data.pipelineSize * (laneOf().height + laneOf().space) + AXIS_HEIGHT;

function paintTimeline(chart) {
  const { height, space } = laneOf();
  const bubbles = hatch(chart.context);
  const drawn = { operations: 0, dummies: 0, bubbles: 0 };
  timeline().rows.forEach((operations, rank) => {
    const top = rank * (height + space);
    chart.context.fillStyle = colour("lane");
    chart.context.fillRect(GUTTER, top, chart.plotWidth, height);
    chart.clipped(top, height, () => paintRow(chart, operations, top, height, bubbles, drawn));
    paintRowName(chart, operations, rank, top, height);
  });
  const axis = timelineHeight() - AXIS_HEIGHT;
  chart.axis(axis, timeLabel, 100 / data.ticks);
  chart.text("of the step", GUTTER + chart.plotWidth + 28, axis + 14, { fill: colour("faint") });
  for (const [name, number] of Object.entries(drawn)) report(name, number);
}

const timeLabel = (value, step) => `${((100 * value) / data.ticks).toFixed(Math.max(0, -Math.floor(Math.log10((100 * step) / data.ticks) + 1e-9)))} %`;

function paintRow(chart, operations, top, height, bubbles, drawn) {
  const gap = (start, stop) => {
    if (stop <= start) return;
    chart.context.fillStyle = bubbles;
    chart.context.fillRect(chart.x(start), top, chart.x(stop) - chart.x(start), height);
    drawn.bubbles++;
  };
  for (const op of operations) {
    if (op.stop < time.start || op.start - op.idle > time.stop) continue;
    gap(op.start - op.idle, op.start);
    paintOperation(chart, op, top, height, bubbles);
    drawn[op.isDummy ? "dummies" : "operations"]++;
  }
  gap(operations.at(-1)?.stop ?? 0, data.ticks);
}

function paintOperation(chart, op, laneTop, laneHeight, bubbles) {
  const c = chart.context;
  const x = chart.x(op.start);
  const full = chart.x(op.stop) - x;
  // No least width: where many operations share a pixel, they and the bubbles between them blend in true proportion.
  const width = full > 3 ? full - 1 : full;
  const height = laneHeight / data.numChunks;
  const y = laneTop + op.chunk * height;
  c.globalAlpha = opacity(op.microbatch);
  c.fillStyle = colour(op.isDummy ? "gap" : op.colour);
  c.fillRect(x, y, width, height - (data.numChunks > 1 ? 1 : 0));
  if (width > 26 && c.measureText(op.name).width + 6 <= width) {
    const fill = inkOn(colour(op.isDummy ? "gap" : op.colour));
    chart.text(op.name, x + width / 2, y + height / 2, { fill, align: "center" });
  }
  c.globalAlpha = 1;
  const focus = focused();
  if (focus?.replica === state.replica && focus.microbatch === op.microbatch) {
    c.strokeStyle = colour("ink");
    c.lineWidth = 2;
    c.strokeRect(x + 1, y + 1, Math.max(1, width - 2), height - 2);
  }
}

// The microbatch that is looked at stands out, what it reads and what reads it stay clear, the rest recedes.
function opacity(microbatch) {
  const focus = focused();
  if (!focus || focus.replica !== state.replica || focus.microbatch === microbatch) return 1;
  const { mb, readers } = timeline();
  const isNear = mb[focus.microbatch][2].includes(microbatch) || readers[focus.microbatch].includes(microbatch);
  return isNear ? 0.75 : 0.2;
}

function paintRowName(chart, operations, rank, top, height) {
  const { pipelineSize, numChunks } = data;
  const isChosen = rank === state.rank;
  chart.font(12, isChosen ? 600 : 400);
  chart.text(`rank ${rank}`, 0, top + height / 2);
  chart.font(12);
  if (numChunks > 1) {
    for (let chunk = 0; chunk < numChunks; chunk++) {
      const y = top + ((chunk + 0.5) * height) / numChunks;
      chart.text(`stage ${chunk * pipelineSize + rank}`, GUTTER - 8, y, { fill: colour("faint"), align: "right" });
    }
  }
  const busy = operations.reduce((sum, op) => sum + op.stop - op.start, 0) / data.ticks;
  const x = GUTTER + chart.plotWidth + 10;
  chart.text(`${percent(busy, 0)} busy`, x, top + height / 2, { fill: colour("faint") });
}

function describeOperation(chart, x, y) {
  const { height, space } = laneOf();
  const rank = Math.floor(y / (height + space));
  const operations = timeline().rows[rank];
  if (!operations || y - rank * (height + space) > height || x > GUTTER + chart.plotWidth) return null;
  const select = () => selectRank(rank);
  if (x < GUTTER) return { tip: [`pipeline rank ${rank}`, "click to see its memory"], select };
  const at = chart.value(x);
  const op = operations[lastAtMost(operations, at)];
  if (!op || at >= op.stop) return { tip: [`rank ${rank} waits`, describeGap(operations, at)], select };
  return { tip: operationLines(op), focus: { replica: state.replica, microbatch: op.microbatch }, select };
}

// Index of the last operation that starts at `at` or before.
function lastAtMost(operations, at) {
  let [low, high] = [0, operations.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (operations[middle].start <= at) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function describeGap(operations, at) {
  const index = lastAtMost(operations, at);
  const start = operations[index]?.stop ?? 0;
  const next = operations[index + 1];
  const length = percent(((next?.start ?? data.ticks) - start) / data.ticks, 2);
  return next ? `${length} of the step, for ${next.name}` : `${length} of the step, its work is done`;
}

function operationLines(op) {
  const { mb, readers } = timeline();
  const [tokens, physical, reads] = mb[op.microbatch];
  const share = (op.stop - op.start) / data.ticks;
  const kind = op.kind === "F" ? "forward" : "backward";
  const names = (list) => few(list.map((m) => `m${m}`), 8);
  const padding = physical - tokens;
  return [
    `${op.name}: ${kind} of microbatch ${op.microbatch} on stage ${op.stage}`,
    op.isDummy ? "a dummy, which fills the schedule" : PHASES[op.colour],
    `${percent(share, 2)} of the step, ${cost(share * data.stepCost)}`,
    `${plural(tokens, "token")}${padding ? ` and ${count(padding)} of padding` : ""}`,
    ...(reads.length ? [`reads K/V of ${names(reads)}`] : []),
    ...(readers[op.microbatch].length ? [`is read by ${names(readers[op.microbatch])}`] : []),
  ];
}

function showTimelineLegend() {
  const present = new Set(timeline().rows.flatMap((row) => row.map((op) => op.colour)));
  const entries = Object.entries(PHASES).filter(([name]) => present.has(name)).map(([name, text]) => [colour(name), text]);
  if (timeline().mb.some(([tokens]) => tokens === 0)) entries.push([colour("gap"), "dummy"]);
  showLegend("schedule-legend", [...entries, ["hatched", "bubble"]]);
}

function startTimeline() {
  new Chart("timeline", time, { height: timelineHeight, paint: paintTimeline, lines: describeOperation });
  time.tools("schedule-tools");
  redraws.push(showTimelineLegend);
}
