"use strict";
const ROW = 28, BAR = 20, AXIS = 26, FIRST = 16;
const thin = new Set(["send", "receive"]);
const slug = (kind) => kind.replace(" ", "-");

function drawCurves() {
  const { steps, loss, tokens_per_second: speed, validation } = data.curve;
  if (!steps.length) return;
  if (validation.length) legend(document.getElementById("loss-legend"), [["training", "accent", "line"], ["validation", "second", "dot"]]);
  curve(document.getElementById("loss"), { x: steps, y: loss, points: validation, format: plainly, label: "Loss by step", pointLabel: "validation" });
  curve(document.getElementById("speed"), { x: steps, y: speed, format: (value) => compact.format(value), label: `${data.counted} per second by step`, fromZero: true });
}

// The names of ranks at the left, what they did at the right, which may be wider than the page.
function drawTimeline() {
  const place = document.getElementById("timeline");
  const trace = data.timeline;
  if (!place || !trace) return;
  const kinds = [...new Set(trace.ranks.flatMap((rank) => rank.events.map((event) => event[0])))];
  const shown = data.kinds.filter((kind) => kinds.includes(kind));
  legend(document.getElementById("timeline-legend"), [...shown.map((kind) => [data.words[kind], slug(kind), thin.has(kind) ? "thin" : ""]), ["bubble", "idle", ""]]);
  let zoom = 1, all = trace.ranks.length <= FIRST;
  const tracks = html("div", "tracks", place), names = html("div", "names", tracks), scroll = html("div", "scroll", tracks);
  scroll.tabIndex = 0;
  scroll.setAttribute("aria-label", "Timeline, can be scrolled sideways");
  let width = 0;
  const draw = () => {
    const ranks = all ? trace.ranks : trace.ranks.slice(0, FIRST);
    names.replaceChildren();
    const title = html("div", "", names);
    title.style.height = `${AXIS}px`;
    html("span", "", title);
    html("small", "", title, "idle");
    for (const rank of ranks) {
      const line = html("div", "", names);
      line.style.height = `${ROW}px`;
      const who = html("span", "", line, `rank ${rank.rank} `);
      html("small", "place", who, rank.place);
      html("small", "", line, percent(rank.idle)).dataset.tip = `idle in the pipeline part of the step: ${percent(rank.idle)}`;
    }
    scroll.replaceChildren();
    const wide = Math.max(width, 560) * zoom, high = AXIS + ranks.length * ROW;
    const across = (time) => (time / trace.seconds) * (wide - 24) + 8;
    const label = `Actions of each rank in step ${trace.step}, ${seconds(trace.seconds)}; bubble ${percent(trace.bubble)}`;
    const picture = svg("svg", { width: wide, height: high, role: "img", "aria-label": label }, scroll);
    for (const mark of ticks(0, trace.seconds, Math.max(4, wide / 140))) {
      svg("line", { class: "grid", x1: across(mark), x2: across(mark), y1: AXIS - 6, y2: high }, picture);
      svg("text", { x: across(mark), y: 13, "text-anchor": mark === 0 ? "start" : "middle" }, picture, seconds(mark));
    }
    ranks.forEach((rank, index) => drawRank(picture, rank, AXIS + index * ROW, across));
  };
  responsive(scroll, (now) => { width = now; draw(); });
  const controls = document.getElementById("timeline-controls");
  const buttons = [1, 2, 4, 8].map((factor) => {
    const button = html("button", "", controls, `${factor}×`);
    button.type = "button";
    button.setAttribute("aria-label", `zoom ${factor} times`);
    button.addEventListener("click", () => {
      const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
      zoom = factor;
      draw();
      scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
    });
    return button;
  });
  buttons[0].setAttribute("aria-pressed", "true");
  if (!all) {
    const more = html("button", "", html("p", "", place), `show all ${trace.ranks.length} ranks`);
    more.style.marginTop = "10px";
    more.addEventListener("click", () => { all = true; draw(); more.remove(); });
  }
}
function drawRank(picture, rank, top, across) {
  const middle = top + ROW / 2;
  for (const [start, end] of rank.windows) {
    svg("rect", { class: "idle", x: across(start), y: middle - BAR / 2, width: across(end) - across(start), height: BAR, rx: 2, "data-tip": `rank ${rank.rank}: bubble\nidle ${percent(rank.idle)} of the pipeline part` }, picture);
  }
  const first = Math.min(...rank.events.map((event) => event[1] ?? Infinity));
  for (const [kind, stage, microBatch, batch, start, end] of rank.events) {
    const wide = Math.max(across(end) - across(start), 0.6), later = stage !== null && stage > first, high = thin.has(kind) ? 6 : later ? BAR - 6 : BAR;
    const what = [`rank ${rank.rank}: ${data.words[kind]}`];
    if (microBatch !== null) what.push(`micro-batch ${microBatch}` + (data.timeline.batches > 1 ? ` of batch ${batch}` : ""));
    if (stage !== null) what.push(`stage ${stage}`);
    what.push(seconds(end - start));
    svg("rect", { class: slug(kind), x: across(start).toFixed(2), y: middle - high / 2, width: Math.max(wide - 0.5, 0.5).toFixed(2), height: high, rx: Math.min(2, wide / 3).toFixed(1), "data-tip": what.join("\n") }, picture);
    if (microBatch !== null && !thin.has(kind) && kind !== "reduce" && wide > 8 + 7 * String(microBatch).length) {
      svg("text", { class: "inside", x: ((across(start) + across(end)) / 2).toFixed(1), y: middle + 4 }, picture, microBatch);
    }
  }
}

function drawMemory() {
  const place = document.getElementById("memory");
  if (!place || !data.memory.length) return;
  const kinds = [["parameters", "parameters"], ["gradients", "gradients"], ["optimizer", "optimizer-state"], ["activations", "activations"]];
  const words = { parameters: "parameters", gradients: "gradients", optimizer: "optimizer state", activations: data.activations };
  legend(document.getElementById("memory-legend"), kinds.map(([kind, colour]) => [words[kind], colour]));
  let all = data.memory.length <= FIRST;
  const tracks = html("div", "tracks", place), names = html("div", "names", tracks), bars = html("div", "scroll", tracks);
  const largest = Math.max(...data.memory.map((rank) => rank.total), 1);
  let width = 0;
  const draw = () => {
    const ranks = all ? data.memory : data.memory.slice(0, FIRST);
    names.replaceChildren();
    bars.replaceChildren();
    for (const rank of ranks) {
      const line = html("div", "", names);
      line.style.height = `${ROW}px`;
      html("small", "place", html("span", "", line, `rank ${rank.rank} `), rank.place);
    }
    const high = ranks.length * ROW + AXIS, room = 76;
    const picture = svg("svg", { width, height: high, role: "img", "aria-label": "Memory of each rank by category" }, bars);
    const across = (value) => (value / largest) * (width - room);
    for (const mark of ticksOf(bytes, 0, largest, width < 480 ? 3 : 6)) {
      const x = across(mark);
      svg("line", { class: "grid", x1: x, x2: x, y1: 0, y2: high - AXIS + 4 }, picture);
      svg("text", { x: Math.max(x, 1), y: high - 6, "text-anchor": mark === 0 ? "start" : "middle" }, picture, mark === 0 ? "0" : bytes(mark));
    }
    ranks.forEach((rank, index) => {
      let start = 0;
      const y = index * ROW + (ROW - BAR) / 2;
      for (const [kind, colour] of kinds) {
        const size = rank[kind] || 0;
        const part = `rank ${rank.rank}: ${words[kind]} ${bytes(size)}\n${percent(size / Math.max(rank.total, 1))} of ${bytes(rank.total)}`;
        if (size > 0) svg("rect", { x: across(start), y, width: Math.max(across(size) - 1, 0.5), height: BAR, rx: 2, style: `fill: var(--${colour})`, "data-tip": part }, picture);
        start += size;
      }
      svg("text", { class: "ink", x: across(rank.total) + 6, y: y + 14 }, picture, bytes(rank.total));
    });
  };
  responsive(bars, (now) => { width = now; draw(); });
  if (!all) {
    const more = html("button", "", html("p", "", place), `show all ${data.memory.length} ranks`);
    more.addEventListener("click", () => { all = true; draw(); more.remove(); });
  }
}

drawCurves();
drawTimeline();
drawMemory();
