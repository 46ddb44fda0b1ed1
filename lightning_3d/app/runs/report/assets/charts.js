"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

// Numbers as people read them.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 999.5 && place + 1 < units.length) { value /= 1024; place += 1; }
  return `${place === 0 || value >= 100 ? whole.format(value) : value.toPrecision(3)} ${units[place]}`;
}
function seconds(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${Number(value.toPrecision(4))} s`;
  return size >= 1e-3 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number((value * 1e6).toPrecision(3))} µs`;
}
function plainly(value) { return plain.format(value); }
function percent(value) { return `${(100 * value).toFixed(1)} %`; }

// Elements.
function svg(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function legend(parent, entries) {
  const list = html("div", "legend", parent);
  for (const [label, colour, kind] of entries) {
    const entry = html("span", "", list);
    html("i", kind || "", entry).style.background = `var(--${colour})`;
    entry.append(label);
  }
}

// One tooltip for everything that has a data-tip.
const tip = html("div", "", document.body);
tip.id = "tip";
tip.setAttribute("role", "tooltip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.style.visibility = "visible";
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}
function hideTip() { tip.style.visibility = "hidden"; }
function follow(event) {
  const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  if (target) showTip(target.dataset.tip, event.clientX, event.clientY);
  else if (!(event.target instanceof Element && event.target.closest("[data-cross]"))) hideTip();
}
document.addEventListener("pointermove", follow);
document.addEventListener("pointerdown", follow);
document.addEventListener("scroll", hideTip, true);

// Draws again when the width changes.
function responsive(parent, draw) {
  let width = 0;
  const check = () => {
    const now = Math.floor(parent.clientWidth);
    if (now === width || now === 0) return;
    width = now;
    draw(width);
  };
  new ResizeObserver(() => requestAnimationFrame(check)).observe(parent);
  check();
}

// Round numbers in [low, high], about `count` of them.
function ticks(low, high, count, integers) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || power;
  if (integers) step = Math.max(1, Math.round(step));
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) found.push(Number((place * step).toPrecision(12)));
  return found;
}
// Of bytes, round numbers in their unit.
function ticksOf(format, low, high, count) {
  const unit = format === bytes ? 1000 ** Math.floor(Math.log10(Math.max(Math.abs(low), Math.abs(high), 1)) / 3) : 1;
  return ticks(low / unit, high / unit, count).map((mark) => mark * unit);
}
// The same numbers with as many digits as tell them apart, where they have no unit.
function labels(marks, format) {
  if (format !== plainly) return marks.map(format);
  const step = marks.length > 1 ? marks[1] - marks[0] : Math.abs(marks[0]) || 1;
  const digits = Math.min(8, (String(Number(step.toPrecision(3))).split(".")[1] || "").length);
  return marks.map((mark) => mark.toFixed(digits));
}
function extent(values, fromZero) {
  const finite = values.filter((value) => value !== null && Number.isFinite(value));
  let low = finite.length ? Math.min(...finite) : 0, high = finite.length ? Math.max(...finite) : 1;
  if (fromZero) low = Math.min(0, low);
  if (high - low < 1e-4 * Math.abs(high)) { low -= 0.01 * Math.abs(high); high += 0.01 * Math.abs(high); }  // equal to rounding
  const room = (high - low) * 0.06 || 0.5;
  return [fromZero && low >= 0 ? 0 : low - room, high + room];
}

/* A curve over steps with its mean over neighbours, points beside it, and a cross-hair.
   x, y: numbers, null where there is none; points: [[x, y]]; format: of y. */
function curve(parent, { x, y, points = [], format, label, fromZero = false, pointLabel = "" }) {
  responsive(parent, (width) => {
    parent.replaceChildren();
    const height = 240, top = 10, bottom = 34, right = 14;
    const [low, high] = extent([...y, ...points.map((point) => point[1])], fromZero);
    const marks = ticks(low, high, 5);
    const texts = labels(marks, format), left = 14 + Math.max(...texts.map((text) => text.length)) * 7;
    const all = [...x, ...points.map((point) => point[0])];
    let first = Math.min(...all), last = Math.max(...all);
    if (first === last) { first -= 1; last += 1; }
    const across = (value) => left + ((value - first) / (last - first)) * (width - left - right);
    const up = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
    const picture = svg("svg", { width, height, role: "img", "aria-label": label, "data-cross": "" }, parent);
    marks.forEach((mark, index) => {
      svg("line", { class: "grid", x1: left, x2: width - right, y1: up(mark), y2: up(mark) }, picture);
      svg("text", { x: left - 8, y: up(mark) + 4, "text-anchor": "end" }, picture, texts[index]);
    });
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, picture);
    for (const mark of ticks(first, last, width < 480 ? 4 : 8, true)) {
      const x = across(mark), text = whole.format(mark), end = x + 3.5 * text.length > width;
      svg("text", { x: end ? width - 1 : x, y: height - bottom + 17, "text-anchor": end ? "end" : "middle" }, picture, text);
    }
    svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, picture, "step");
    const mean = x.length > 40 ? runningMean(y, Math.max(5, Math.round(x.length / 40))) : null;
    svg("path", { class: mean ? "raw" : "mean", d: path(x, y, across, up) }, picture);
    if (mean) svg("path", { class: "mean", d: path(x, mean, across, up) }, picture);
    if (x.length === 1 && y[0] !== null) svg("circle", { class: "here", cx: across(x[0]), cy: up(y[0]), r: 4 }, picture);
    for (const [place, value] of points) svg("circle", { class: "dot", cx: across(place), cy: up(value), r: 4.5 }, picture);
    const cross = svg("g", { visibility: "hidden" }, picture);
    const line = svg("line", { class: "cross", y1: top, y2: height - bottom }, cross);
    const here = svg("circle", { class: "here", r: 4.5 }, cross);
    picture.addEventListener("pointermove", (event) => {
      const wanted = first + ((event.clientX - picture.getBoundingClientRect().left - left) / (width - left - right)) * (last - first);
      let nearest = -1;
      for (let i = 0; i < x.length; i += 1) if (y[i] !== null && (nearest < 0 || Math.abs(x[i] - wanted) < Math.abs(x[nearest] - wanted))) nearest = i;
      if (nearest < 0) return;
      cross.setAttribute("visibility", "visible");
      line.setAttribute("x1", across(x[nearest])); line.setAttribute("x2", across(x[nearest]));
      here.setAttribute("cx", across(x[nearest])); here.setAttribute("cy", up(y[nearest]));
      const beside = points.find((point) => point[0] === x[nearest]);
      const more = beside ? `\n${pointLabel} ${format(beside[1])}` : "";
      showTip(`step ${whole.format(x[nearest])}\n${format(y[nearest])}${more}`, event.clientX, event.clientY);
    });
    picture.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
  });
}
function path(x, y, across, up) {
  let text = "", pen = "M";
  for (let i = 0; i < x.length; i += 1) {
    if (y[i] === null) { pen = "M"; continue; }
    text += `${pen}${across(x[i]).toFixed(1)} ${up(y[i]).toFixed(1)}`;
    pen = "L";
  }
  return text;
}
// Of each value and its neighbours, as many at its left as at its right.
function runningMean(values, window) {
  return values.map((value, place) => {
    if (value === null) return null;
    const reach = Math.min(Math.floor(window / 2), place, values.length - 1 - place);
    const near = values.slice(place - reach, place + reach + 1).filter((each) => each !== null);
    return near.reduce((sum, each) => sum + each, 0) / near.length;
  });
}
