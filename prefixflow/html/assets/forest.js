// The forest: what a dense run and a run with reuse compute at each position, and below it every segment.
//
// A trajectory is one lane. A segment covers the lanes of its trajectories: children from its top down, in order, then
// those that end in it.

const SEGMENT_WIDTH = 7;
const PROFILE_HEIGHT = 128;
const MOST_HEIGHT = 520;
const WIDEST_LANE = 18;

const forest = layOut(data.forest);

function layOut({ trees, segments, ids }) {
  const all = [];
  let lanes = 0;
  trees.forEach(([name, replica, size], tree) => {
    const first = all.length;
    const top = lanes;
    for (let i = first; i < first + size; i++) {
      const [parentIndex, tokens, members, microbatch, rows, written, source] = segments.slice(
        i * SEGMENT_WIDTH,
        (i + 1) * SEGMENT_WIDTH,
      );
      const parent = parentIndex < 0 ? null : all[parentIndex];
      const lane = parent ? parent.nextLane : lanes;
      if (parent) parent.nextLane += members;
      else lanes += members;
      const start = parent ? parent.stop : 0;
      const place = { start, stop: start + tokens, lane, nextLane: lane };
      all.push({ parent, tree, replica, tokens, members, microbatch, rows, written, id: ids[source], children: [], ...place });
      parent?.children.push(all[i]);
    }
    trees[tree] = { name, replica, first, size, top, lanes: lanes - top };
  });
  const most = all.reduce((largest, s) => Math.max(largest, s.members), 1);
  return { trees, segments: all, lanes, most };
}

const positions = new View(Math.max(1, data.forest.profile.end), 8);
let laneHeight = Math.min(WIDEST_LANE, Math.max(1.5, (MOST_HEIGHT - 40) / Math.max(1, forest.lanes)));
const forestHeight = () => Math.min(MOST_HEIGHT, Math.max(24, Math.ceil(forest.lanes * laneHeight)));

function shareColour(members) {
  if (members < 2) return colour("BF");
  const share = forest.most > 2 ? Math.log2(members / 2) / Math.log2(forest.most / 2) : 1;
  return blend(colour("share-low"), colour("share-high"), share);
}

function paintForest(chart) {
  const c = chart.context;
  const scroll = element("forest-scroll").scrollTop;
  const height = chart.height();
  const [first, last] = [scroll / laneHeight, (scroll + height) / laneHeight];
  let drawn = 0;
  chart.clipped(0, height, () => {
    for (const tree of forest.trees) {
      if (tree.top + tree.lanes < first || tree.top > last) continue;
      for (let i = tree.first; i < tree.first + tree.size; i++) {
        const s = forest.segments[i];
        if (s.lane + s.members < first || s.lane > last) continue;
        if (s.stop < positions.start || s.start > positions.stop) continue;
        paintSegment(chart, s, scroll);
        drawn++;
      }
    }
  });
  paintTreeNames(chart, scroll, first, last);
  report("segments", forest.segments.length);
  report("segments-drawn", drawn);
}

function paintSegment(chart, s, scroll) {
  const c = chart.context;
  const x = chart.x(s.start);
  const seam = laneHeight >= 4 ? 1 : 0;
  const width = Math.max(0.75, chart.x(s.stop) - x - (chart.x(s.stop) - x > 3 ? 1 : 0));
  const y = s.lane * laneHeight - scroll;
  const height = s.members * laneHeight - seam;
  const strong = shareColour(s.members);
  const focus = focused();
  const isFocused = focus && focus.replica === s.replica && focus.microbatch === s.microbatch;
  c.globalAlpha = focus && !isFocused ? 0.35 : 1;
  if (s.members > 1) {
    c.fillStyle = blend(strong, colour("paper"), 0.62);
    c.fillRect(x, y, width, height);
  }
  c.fillStyle = strong;
  c.fillRect(x, y, width, Math.min(height, Math.max(laneHeight - seam, 0.5)));
  c.globalAlpha = 1;
  if (isFocused) {
    c.strokeStyle = colour("ink");
    c.lineWidth = 2;
    c.strokeRect(x + 1, y + 1, Math.max(1, width - 2), Math.max(1, height - 2));
  }
  if (width > 30 && height >= 12) paintSegmentName(chart, s, strong, x, y, width, height);
}

function paintSegmentName(chart, s, strong, x, y, width, height) {
  const left = Math.max(x, GUTTER) + 5;
  const room = x + width - left - 4;
  const [times, microbatch] = [`×${count(s.members)}`, `m${s.microbatch}`];
  const size = `${plural(s.tokens, "token")} · ${microbatch}`;
  const texts = s.members > 1 ? [`${times} · ${size}`, `${times} ${microbatch}`, times] : [size, microbatch];
  const text = texts.find((t) => chart.context.measureText(t).width <= room);
  if (!text) return;
  const isInStrip = laneHeight >= 13 || s.members === 1;
  const middle = isInStrip ? y + Math.min(laneHeight, height) / 2 : y + height / 2;
  const ground = isInStrip ? strong : blend(strong, colour("paper"), 0.62);
  chart.text(text, left, middle, { fill: inkOn(ground) });
}

function paintTreeNames(chart, scroll, first, last) {
  let free = -Infinity;
  for (const tree of forest.trees) {
    if (tree.top + tree.lanes < first || tree.top > last) continue;
    const y = tree.top * laneHeight - scroll;
    const bottom = y + tree.lanes * laneHeight;
    if (tree.lanes * laneHeight > 5 && y > 0) {
      chart.context.fillStyle = colour("rule");
      chart.context.fillRect(0, Math.round(y) - 1, GUTTER - 6, 1);
    }
    const at = Math.max(y, 0) + 8;
    if (at < free || at + 4 > bottom + 8) continue;
    chart.text(tree.name, 0, at, { fill: colour("faint"), most: GUTTER - 12 });
    if (data.replicas.length > 1 && bottom - at > 22) {
      chart.text(`replica ${tree.replica}`, 0, at + 14, { fill: colour("faint") });
      free = at + 28;
    } else free = at + 14;
  }
}

function segmentAt(chart, x, y) {
  if (x < GUTTER || x > GUTTER + chart.plotWidth) return null;
  const lane = (y + element("forest-scroll").scrollTop) / laneHeight;
  const position = chart.value(x);
  const tree = forest.trees.find((t) => t.top <= lane && lane < t.top + t.lanes);
  if (!tree) return null;
  for (let i = tree.first; i < tree.first + tree.size; i++) {
    const s = forest.segments[i];
    if (s.start <= position && position < s.stop && s.lane <= lane && lane < s.lane + s.members) return s;
  }
  return null;
}

// Ids of a few trajectories through `s`: its own and those of what branches off below it.
function someIds(s, most) {
  const ids = new Set([s.id]);
  const below = [...s.children];
  while (below.length && ids.size < most) {
    const next = below.pop();
    ids.add(next.id);
    below.push(...next.children);
  }
  return [...ids];
}

function describeSegment(chart, x, y) {
  const s = segmentAt(chart, x, y);
  if (!s) return null;
  const ids = someIds(s, Math.min(3, s.members));
  const others = s.members - ids.length;
  const tip = [
    `${forest.trees[s.tree].name}: ${plural(s.tokens, "token")}, positions ${count(s.start)} to ${count(s.stop)}`,
    `${plural(s.members, "trajectory", "trajectories")}: ${ids.join(", ")}${others > 0 ? ` and ${count(others)} more` : ""}`,
    s.members > 1 ? `saves ${plural((s.members - 1) * s.tokens, "token")}` : "shared with nothing",
    `${plural(s.rows, "loss row")}`,
    `microbatch ${s.microbatch} on replica ${s.replica}${s.written ? ", K/V cached for later microbatches" : ""}`,
  ];
  const select = () => data.replicas[s.replica].rows && selectReplica(s.replica);
  return { tip, focus: { replica: s.replica, microbatch: s.microbatch }, select };
}

function paintProfile(chart) {
  const { width, end, logical, computed, shared } = data.forest.profile;
  const [top, bottom] = [14, PROFILE_HEIGHT - 24];
  const most = logical.reduce((a, b) => Math.max(a, b), 1);
  const y = (value) => bottom - (value / most) * (bottom - top);
  const area = (values, fill) => {
    chart.context.fillStyle = fill;
    chart.context.beginPath();
    chart.context.moveTo(chart.x(0), bottom);
    values.forEach((value, i) => {
      chart.context.lineTo(chart.x(i * width), y(value));
      chart.context.lineTo(chart.x(Math.min(end, (i + 1) * width)), y(value));
    });
    chart.context.lineTo(chart.x(end), bottom);
    chart.context.fill();
  };
  chart.clipped(top, bottom - top, () => {
    area(logical, blend(colour("share-high"), colour("paper"), 0.74));
    area(computed, colour("BF"));
    area(shared, colour("share-high"));
  });
  chart.text("lanes run", GUTTER - 8, (top + bottom) / 2, { fill: colour("faint"), align: "right" });
  for (const value of [...new Set([0, most])]) {
    chart.text(count(Math.round(value)), GUTTER - 8, y(value), { fill: colour("faint"), align: "right" });
  }
  chart.context.fillStyle = colour("rule");
  chart.context.fillRect(GUTTER, bottom, chart.plotWidth, 1);
  chart.axis(bottom, (value) => count(Math.round(value)), 1);
  chart.text("position", GUTTER + chart.plotWidth + 10, bottom + 14, { fill: colour("faint") });
  report("profile-bins", logical.length);
}

function describeProfile(chart, x) {
  const { width, end, logical, computed, shared } = data.forest.profile;
  const bin = Math.floor(chart.value(x) / width);
  if (x < GUTTER || !(bin in logical)) return null;
  const stop = Math.min(end, (bin + 1) * width);
  const place = stop - bin * width > 1 ? `positions ${count(bin * width)} to ${count(stop)}` : `position ${count(bin)}`;
  return { tip: [place, `dense runs ${count(logical[bin])}`, `reuse runs ${count(computed[bin])}, ${count(shared[bin])} of them shared`] };
}

function setLaneHeight(height) {
  const scroll = element("forest-scroll");
  const middle = (scroll.scrollTop + scroll.clientHeight / 2) / laneHeight;
  laneHeight = Math.min(40, Math.max(Math.min(0.02, 40 / Math.max(1, forest.lanes)), height));
  sizeForest();
  scroll.scrollTop = middle * laneHeight - scroll.clientHeight / 2;
  redrawAll();
}

function sizeForest() {
  element("forest-scroll").style.height = `${forestHeight() + 1}px`;
  element("forest-space").style.height = `${Math.ceil(forest.lanes * laneHeight)}px`;
}

function startForest() {
  sizeForest();
  const profile = new Chart("profile", positions, { height: () => PROFILE_HEIGHT, paint: paintProfile, lines: describeProfile });
  const scroll = element("forest-scroll");
  const chart = new Chart("forest-canvas", positions, {
    height: forestHeight,
    paint: paintForest,
    lines: describeSegment,
    onVertical: (dy) => (scroll.scrollTop += dy),
  });
  scroll.addEventListener("scroll", () => chart.draw());
  // The scroll bar takes room from the segments only: give the profile the same width.
  redraws.unshift(() => (profile.canvas.style.width = `${scroll.clientWidth}px`));
  const tools = element("forest-tools");
  const label = (text) => Object.assign(document.createElement("span"), { textContent: text });
  tools.append(
    label("lanes"),
    button("−", "lower lanes", () => setLaneHeight(laneHeight / 1.6)),
    button("+", "higher lanes", () => setLaneHeight(laneHeight * 1.6)),
    button("all", "all lanes at once", () => setLaneHeight(Math.min(WIDEST_LANE, MOST_HEIGHT / Math.max(1, forest.lanes)))),
    label("positions"),
  );
  positions.tools("forest-tools");
  redraws.push(showForestLegend);
  element("forest-note").textContent = forestNote();
}

function forestNote() {
  const { numTrees, numSegments } = data.forest;
  const shown = forest.trees.length;
  const order = shown > 1 ? "Trees that save most come first." : "";
  if (forest.segments.length === numSegments) return order;
  return `${order} Drawn: ${count(shown)} of ${plural(numTrees, "tree")}, ${count(forest.segments.length)} of ${count(numSegments)} segments.`;
}

function showForestLegend() {
  const entries = [[colour("BF"), "own tokens"]];
  const steps = [];
  for (let members = 2; members < forest.most; members *= 2) steps.push(members);
  if (forest.most > 1) steps.push(forest.most);
  const shown = steps.filter((_, i) => steps.length <= 6 || i % Math.ceil(steps.length / 6) === 0 || i === steps.length - 1);
  shown.forEach((members) => entries.push([shareColour(members), `×${count(members)}`]));
  showLegend("forest-legend", entries);
}
