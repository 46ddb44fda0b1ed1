"use strict";
const formats = { count: (value) => compact.format(value), bytes, percent, seconds, plain: plainly };
const names = Object.keys(data.numbers);
const show = (name, value) => formats[data.numbers[name].format](value);
const having = (...wanted) => data.jobs.filter((job) => wanted.every((name) => job.numbers[name] !== undefined));
// A job that was interrupted or has failed is shown, but is never the best: its numbers are those of another length of training.
const finished = (...wanted) => having(...wanted).filter((job) => job.status === "finished");
const better = (name, one, other) => (data.numbers[name].better === "more" ? one > other : one < other);
const clearly = (name, one, other) => better(name, one, other) && Math.abs(one - other) > 1e-4 * Math.abs(one);  // losses of layouts differ by rounding
// What tells a job from the others, in a few characters.
function short(job) {
  const swept = data.keys.map((key, place) => [key.split(".").pop(), job.values[place]]).filter(([, value]) => value);
  return [job.layout, ...swept.map(([key, value]) => `${key}=${value}`)].filter(Boolean).join("  ") || `job ${job.job}`;
}

function choose(parent, label, chosen, changed) {
  const line = html("label", "", parent, label);
  const select = html("select", "", line);
  for (const name of names) html("option", "", select, data.numbers[name].name).value = name;
  select.value = chosen;
  select.addEventListener("change", () => changed(select.value));
}
function empty(place, text) { place.replaceChildren(); html("p", "empty", place, text); }

function drawBars() {
  const place = document.getElementById("bars");
  if (!names.length) return empty(place, "No job has numbers yet.");
  let name = names[0], width = 0;
  const draw = () => {
    if (!width) return;
    const jobs = having(name).sort((one, other) => (better(name, one.numbers[name], other.numbers[name]) ? -1 : 1));
    document.getElementById("bars-note").textContent = `${data.numbers[name].name}: ${data.numbers[name].better} is better`;
    place.replaceChildren();
    const row = 44, high = jobs.length * row + 4, largest = Math.max(...jobs.map((job) => job.numbers[name]), 0) || 1;
    const picture = svg("svg", { width, height: high, role: "img", "aria-label": `${data.numbers[name].name} of each job` }, place);
    jobs.forEach((job, index) => {
      const y = index * row, size = Math.max((job.numbers[name] / largest) * width, 2);
      const room = Math.floor((width - 80) / 7), label = `${job.job}  ${short(job)}`;
      svg("text", { class: "ink", x: 0, y: y + 14 }, picture, label.length > room ? `${label.slice(0, room - 1)}…` : label);
      svg("text", { class: "ink", x: width, y: y + 14, "text-anchor": "end" }, picture, show(name, job.numbers[name]));
      svg("rect", { class: "forward", x: 0, y: y + 20, width: size, height: 14, rx: 3, style: index ? "opacity: .62" : "", "data-tip": `job ${job.job}: ${short(job)}\n${data.numbers[name].name} ${show(name, job.numbers[name])}` }, picture);
    });
  };
  choose(document.getElementById("bars-controls"), "", name, (chosen) => { name = chosen; draw(); });
  responsive(place, (now) => { width = now; draw(); });
}

// Jobs that no other one beats in both numbers, from the best in the first to the best in the second.
function frontier(jobs, x, y) {
  const beaten = (job) => jobs.some((other) => other !== job
    && !clearly(x, job.numbers[x], other.numbers[x]) && !clearly(y, job.numbers[y], other.numbers[y])
    && (clearly(x, other.numbers[x], job.numbers[x]) || clearly(y, other.numbers[y], job.numbers[y])));
  return jobs.filter((job) => !beaten(job)).sort((one, other) => one.numbers[x] - other.numbers[x]);
}

function drawPareto() {
  const place = document.getElementById("pareto");
  if (names.length < 2) return empty(place, "A trade-off needs two numbers.");
  let x = names[0], y = names.find((name) => name !== x && having(x, name).length > 1) || names[1], width = 0;
  const draw = () => {
    if (!width) return;
    const jobs = having(x, y), best = frontier(finished(x, y), x, y);
    const note = document.getElementById("pareto-note");
    if (!jobs.length) { note.textContent = ""; return empty(place, "No job has both numbers."); }
    note.textContent = `filled points, joined by a line: no other job is better in both numbers (${data.numbers[x].name}: ${data.numbers[x].better}, ${data.numbers[y].name}: ${data.numbers[y].better})`;
    place.replaceChildren();
    const height = 310, top = 30, bottom = 40, right = 16;
    const [left_, right_] = extent(jobs.map((job) => job.numbers[x])), [low, high] = extent(jobs.map((job) => job.numbers[y]));
    const form = (name) => formats[data.numbers[name].format], rows = ticksOf(form(y), low, high, 5), texts = labels(rows, form(y));
    const left = 14 + Math.max(...texts.map((text) => text.length)) * 7;
    const across = (value) => left + ((value - left_) / (right_ - left_)) * (width - left - right);
    const up = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
    const picture = svg("svg", { width, height, role: "img", "aria-label": `${data.numbers[y].name} against ${data.numbers[x].name}` }, place);
    rows.forEach((mark, index) => {
      svg("line", { class: "grid", x1: left, x2: width - right, y1: up(mark), y2: up(mark) }, picture);
      svg("text", { x: left - 8, y: up(mark) + 4, "text-anchor": "end" }, picture, texts[index]);
    });
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, picture);
    const columns = ticksOf(form(x), left_, right_, width < 420 ? 3 : 5);
    labels(columns, form(x)).forEach((text, index) => svg("text", { x: across(columns[index]), y: height - bottom + 16, "text-anchor": "middle" }, picture, text));
    svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, picture, data.numbers[x].name);
    svg("text", { x: 0, y: 13 }, picture, data.numbers[y].name);
    svg("path", { class: "mean", d: best.map((job, index) => `${index ? "L" : "M"}${across(job.numbers[x])} ${up(job.numbers[y])}`).join("") , style: "stroke-dasharray: 5 4; stroke-width: 1.5" }, picture);
    const labelled = [];
    for (const job of jobs) {
      const on = best.includes(job), point = { cx: across(job.numbers[x]), cy: up(job.numbers[y]), r: 6.5 };
      svg("circle", { ...point, style: on ? "fill: var(--accent); stroke: var(--card); stroke-width: 2" : "fill: var(--card); stroke: var(--muted); stroke-width: 2", "data-tip": `job ${job.job}: ${short(job)}\n${data.numbers[x].name} ${show(x, job.numbers[x])}\n${data.numbers[y].name} ${show(y, job.numbers[y])}` }, picture);
      const before = point.cx > width - 40;
      let below = point.cy - 7;
      while (labelled.some(([x_, y_]) => Math.abs(x_ - point.cx) < 18 && Math.abs(y_ - below) < 12)) below += 12;
      labelled.push([point.cx, below]);
      svg("text", { class: "ink", style: "paint-order: stroke; stroke: var(--card); stroke-width: 4px", x: point.cx + (before ? -10 : 10), y: below, "text-anchor": before ? "end" : "start" }, picture, job.job);
    }
  };
  const controls = document.getElementById("pareto-controls");
  choose(controls, "x", x, (chosen) => { x = chosen; draw(); });
  choose(controls, "y", y, (chosen) => { y = chosen; draw(); });
  responsive(place, (now) => { width = now; draw(); });
}

function drawTable() {
  const place = document.getElementById("jobs");
  const columns = [["job", (job) => job.job], ["status", (job) => job.status]];
  if (data.layouts) columns.push(["layout", (job) => job.layout]);
  data.keys.forEach((key, index) => columns.push([key, (job) => job.values[index]]));
  for (const name of names) columns.push([name, (job) => job.numbers[name], name]);
  const best = Object.fromEntries(names.map((name) => [name, finished(name).map((job) => job.numbers[name]).reduce((one, other) => (one !== undefined && better(name, one, other) ? one : other), undefined)]));
  let order = 0, rising = true;
  const draw = () => {
    place.replaceChildren();
    const table = html("table", "", place), head = html("tr", "", html("thead", "", table));
    columns.forEach(([title, , name], index) => {
      const cell = html("th", name || title === "job" ? "number" : "", head);
      cell.scope = "col";
      if (index === order) cell.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const button = html("button", "", cell, name ? data.numbers[name].name : title);
      button.type = "button";
      button.addEventListener("click", () => { rising = index === order ? !rising : true; order = index; draw(); });
    });
    const value = columns[order][1];
    const compare = (one, other) => {
      const [first, second] = [value(one), value(other)];
      if (first === undefined || second === undefined) return (first === undefined) - (second === undefined);
      return (typeof first === "number" ? first - second : String(first).localeCompare(String(second))) * (rising ? 1 : -1);
    };
    const body = html("tbody", "", table);
    for (const job of [...data.jobs].sort(compare)) {
      const line = html("tr", "", body), told = Object.keys(job.numbers).length === 0 && job.reason;
      for (const [title, of, name] of columns) {
        if (name && told) continue;
        const cell = html("td", name || title === "job" ? "number" : "", line);
        const content = of(job);
        if (title === "job" && job.report) {
          const link = html("a", "", cell, content);
          link.href = `./${encodeURI(job.report)}`;  // never another scheme, whatever the folder is called
          link.setAttribute("aria-label", `report of job ${job.job}`);
        } else if (title === "status") html("span", `badge ${job.badge}`, cell, content);
        else if (name) {
          cell.textContent = content === undefined ? "–" : show(name, content);
          const among = finished(name), top = (value) => !clearly(name, best[name], value);
          if (among.includes(job) && top(content) && !among.every((other) => top(other.numbers[name]))) cell.classList.add("best");
        } else cell.textContent = content;
      }
      if (job.reason) {
        const cell = html("td", "reason", told ? line : html("tr", "", body), job.reason);
        cell.colSpan = told ? names.length || 1 : columns.length;
        if (!told) line.classList.add("told");
      }
    }
  };
  draw();
}

drawBars();
drawPareto();
drawTable();
