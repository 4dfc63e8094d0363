// The doctor's page: decodes the numbers of packing.py and keeps figures, menus and links on one selection.

const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const COLOURS = [1, 2, 3, 4, 5, 6].map((number) => `var(--series-${number})`);
const PANELS = ["casts.amax", "casts.scale", "casts.stale_ratio", "casts.sqnr_db", "casts.underflow_fraction",
  "casts.saturation_fraction"];
const MOST_DOUBLINGS = 5; // marks of a panel's axis: more would touch
const shades = (name, count) => Array.from({ length: count }, (_, index) => `var(--${name}-${index + 1})`);
const INK = "var(--ink)", MUTED = "var(--muted)", CHOSEN = "var(--focus)";
const { missing: MISSING, pale: PALE, tinted: TINTED, warm: WARM } = data.colours;
const COOL = shades("cool", 5), COLD = shades("cold", 3);
const MONOSPACE = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
const selected = { statistic: null, sheet: 0, layer: 0, column: 0, finding: null }; // statistic: its name
const columns = data.first ? data.first.length : 0;

// ---- numbers -------------------------------------------------------------------------------------------------------

function decode(sheet) {
  if (sheet.cells) return sheet.cells;
  const bytes = Uint8Array.from(atob(sheet.data), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer), [low, high] = sheet.span;
  const cells = new Float64Array(bytes.length / 2);
  for (let i = 0; i < cells.length; i++) cells[i] = number(view.getUint16(2 * i, true), low, high - low, sheet.log);
  sheet.cells = cells;
  return cells;
}

function number(code, low, width, log) {
  if (code === 65535) return NaN;
  if (code === 65534) return Infinity;
  if (!log) return code === 65533 ? -Infinity : low + (code / 65532) * width;
  return code === 0 ? 0 : Math.exp(low + ((code - 1) / 65531) * width);
}

function curve(sheet, layer) {
  const row = sheet.rows.indexOf(layer);
  return row < 0 ? null : decode(sheet).subarray(row * columns, (row + 1) * columns);
}

function digits(value, count = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(count - 1).replace("e+", "e");
  return Number(value.toPrecision(count)).toLocaleString("en", { maximumFractionDigits: 8 });
}

function written(value, kind) {
  if (Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "+Inf" : "−Inf";
  if (kind === "fraction") return `${digits(100 * value)} %`;
  if (kind === "decibel") return `${value.toFixed(1)} dB`;
  if (kind === "count") return Math.round(value).toLocaleString("en");
  if (kind === "ratio") return `${digits(value)}×`;
  return digits(value);
}

function healthy(statistic) {
  const { low, high, kind } = statistic;
  if (low === null && high === null) return "no healthy range of its own";
  if (low === null) return high === 0 ? "healthy: 0" : `healthy: up to ${written(high, kind)}`;
  if (high === null) return `healthy: from ${written(low, kind)}`;
  return `healthy: ${written(low, kind)} to ${written(high, kind)}`;
}

const steps = (column) => {
  const first = data.first[column], last = data.last[column];
  return first === last ? `step ${first.toLocaleString("en")}`
    : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
};
const layerName = (index) => data.layers[index] || "(the model itself)";
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ---- colours: the page's is healthy, warm is worse, blue is a number without a verdict --------------------------------------

function spread(statistic, cells) {
  const limit = statistic.high || statistic.low;
  let tiny = Infinity;
  for (const value of cells) if (value > 0 && value < tiny) tiny = value;
  const floor = statistic.kind === "fraction" ? limit / 100 : Math.min(tiny, statistic.low || tiny);
  const isLog = ["magnitude", "ratio"].includes(statistic.kind) || (statistic.kind === "fraction" && limit);
  if (isLog) return { to: (value) => Math.log10(Math.max(value, floor)), from: (z) => 10 ** z, isLog };
  if (statistic.kind === "count") return { to: (value) => Math.log10(1 + value), from: (z) => 10 ** z - 1, isLog };
  return { to: (value) => value, from: (z) => z, isLog };
}

function limits(statistic, heights, to) {
  let low = Infinity, high = -Infinity;
  for (const z of heights) {
    if (z < low) low = z;
    if (z > high && z < Infinity) high = z;
  }
  if (low > high) [low, high] = [0, 1];
  const ends = [statistic.low, statistic.high].filter((end) => end !== null).map(to);
  low = Math.max(Math.min(low, ...ends), -1e9);
  high = Math.max(high, ...ends);
  if (statistic.kind === "signed" && !ends.length) [low, high] = [-Math.max(-low, high), Math.max(-low, high)];
  if (statistic.kind === "decibel" && statistic.low !== null) low = Math.min(low, 0);
  if (statistic.kind === "fraction" && statistic.high !== null) high = Math.max(high, 0);
  if (statistic.kind === "ratio") [low, high] = [Math.min(low, ...ends, -1), Math.max(high, ...ends, 1)];
  if (high - low < 1e-9) high = low + 1;
  return [low, high];
}

const ramp = (colours, from, to) => colours.map((colour, i) => [from + ((to - from) * i) / (colours.length - 1), colour]);

function colours(statistic, [low, high], to) {
  const at = (value) => (to(value) - low) / (high - low);
  const hasLow = statistic.low !== null, hasHigh = statistic.high !== null;
  if (!hasLow && !hasHigh) {
    if (statistic.kind !== "signed") return ramp(COOL, 0, 1);
    return [...ramp(COLD, 0, 0.42), [0.5, PALE], ...ramp(WARM, 0.58, 1)];
  }
  const [a, b] = [hasLow ? Math.max(0, at(statistic.low)) : 0, hasHigh ? Math.min(1, at(statistic.high)) : 1];
  const isTwoSided = hasLow && hasHigh;
  const under = a <= 0 ? [] : isTwoSided ? ramp(COLD, 0, a) : ramp([...WARM].reverse(), 0, a);
  const over = b >= 1 ? [] : ramp(WARM, b, 1);
  const inside = isTwoSided ? [[a, COOL[0]], [(a + b) / 2, PALE], [b, TINTED]]
    : hasHigh ? [[0, PALE], [b, TINTED]] : [[a, TINTED], [1, PALE]];
  return [...under, ...inside, ...over];
}

function ticks(statistic, [low, high], shade) {
  const values = [];
  if (shade.isLog || statistic.kind === "count") {
    const every = Math.max(1, Math.ceil((high - low) / 6));
    for (let z = Math.ceil(low); z <= high; z += every) values.push(z);
  }
  if (values.length < 2) {
    values.length = 0;
    for (let i = 0; i <= 4; i++) values.push(low + ((high - low) * i) / 4);
  }
  const isHealthLimit = [statistic.low, statistic.high].filter((end) => end !== null).map(shade.to);
  const near = (z) => isHealthLimit.some((end) => Math.abs(end - z) < (high - low) / 14);
  const kept = [...values.filter((z) => !near(z)), ...isHealthLimit];
  const text = (z) => written(shade.from(z), statistic.kind === "ratio" ? "ratio" : statistic.kind);
  return { tickvals: kept, ticktext: kept.map((z) => (isHealthLimit.includes(z) ? `<b>${text(z)}</b>` : text(z))) };
}

// ---- the heat map ------------------------------------------------------------------------------------------------------

const named = (name) => data.statistics.find((one) => one.name === name);
const statistic = () => named(selected.statistic);
const sheet = () => statistic().sheets[selected.sheet];

function layout(extra) {
  const base = structuredClone(data.layout);
  return { ...base, ...extra, xaxis: { ...base.xaxis, ...extra.xaxis }, yaxis: { ...base.yaxis, ...extra.yaxis } };
}

function rowLabels(rows, pixels) {
  const most = by("heat").clientWidth < 640 ? 18 : 32;
  const size = Math.min(12, Math.max(10, pixels));
  const every = Math.max(1, Math.ceil(15 / pixels));
  const shown = rows.map((_, row) => row).filter((row) => row % every === 0);
  const text = shown.map((row) => {
    const name = layerName(rows[row]);
    return escaped(name.length > most ? `…${name.slice(1 - most)}` : name);
  });
  const longest = Math.max(...shown.map((row) => Math.min(most, layerName(rows[row]).length)));
  return { axis: { tickvals: shown, ticktext: text, tickfont: { size, family: MONOSPACE } }, width: 10 + 0.62 * size * longest };
}

// Columns are equally wide, whatever the steps between samples: plotly draws them many times faster than uneven ones.
function stepTicks() {
  const every = Math.max(1, Math.ceil(columns / Math.max(3, by("heat").clientWidth / 110)));
  const tickvals = [];
  for (let column = 0; column < columns; column += every) tickvals.push(column);
  return { tickvals, ticktext: tickvals.map((column) => data.first[column].toLocaleString("en")) };
}

function drawMap() {
  const what = statistic(), { rows } = sheet(), cells = decode(sheet()), shade = spread(what, cells);
  const heights = Float64Array.from(cells, shade.to), range = limits(what, heights, shade.to);
  const z = rows.map((_, row) => Float64Array.from(heights.subarray(row * columns, (row + 1) * columns),
    (height) => Math.min(height, range[1])));
  const pixels = Math.min(22, Math.max(4, 640 / rows.length)), labels = rowLabels(rows, pixels);
  const trace = { type: "heatmap", x0: 0, dx: 1, y0: 0, dy: 1, z, zmin: range[0], zmax: range[1],
    colorscale: colours(what, range, shade.to), hoverinfo: "none", hoverongaps: true,
    colorbar: { thickness: 11, outlinewidth: 1, outlinecolor: "var(--edge)", ypad: 4, xpad: 8, tickfont: { size: 11.5 }, ...ticks(what, range, shade) } };
  by("heat").style.height = `${Math.round(pixels * rows.length + 64)}px`;
  const shape = layout({ plot_bgcolor: MISSING, hovermode: "closest", margin: { l: labels.width, r: 10, t: 6, b: 44 },
    xaxis: { range: [-0.5, columns - 0.5], showgrid: false, rangemode: "normal", ...stepTicks() },
    yaxis: { title: { text: "" }, range: [rows.length - 0.5, -0.5], showgrid: false, automargin: false, ...labels.axis },
    shapes: marks(), dragmode: false });
  draw("heat", [trace], shape);
  about(what);
}

function about(what) {
  by("about").innerHTML = `<span><b>${escaped(what.title)}</b>: ${escaped(what.meaning)}</span>` +
    `<span>${escaped(healthy(what))}</span>`;
}

const box = ([first, last], row, width, colour) => ({ type: "rect", x0: first - 0.5, x1: last + 0.5, y0: row - 0.5, y1: row + 0.5,
  line: { color: colour, width }, fillcolor: "rgba(0,0,0,0)" });

function reach(target) {
  const found = data.last.findIndex((last) => last >= target.first), first = found < 0 ? columns - 1 : found;
  let last = columns - 1;
  while (last > first && data.first[last] > target.last) last--;
  return [first, last];
}

function marks() {
  const { rows } = sheet();
  const shapes = data.findings.flatMap((target, index) => {
    const isHere = target && target.statistic === statistic().name && target.sheet === selected.sheet;
    if (!isHere || index >= 60) return [];
    const isChosen = index === selected.finding;
    return [box(reach(target), rows.indexOf(target.layer), isChosen ? 3 : 1, isChosen ? CHOSEN : INK)];
  });
  const row = rows.indexOf(selected.layer);
  if (row < 0) return shapes;
  return [...shapes, box([0, columns - 1], row, 1, MUTED),
    box([selected.column, selected.column], row, 2, INK)];
}

function cellText(row, column) {
  const value = decode(sheet())[row * columns + column];
  return { layer: layerName(sheet().rows[row]), when: steps(column), value: written(value, statistic().kind) };
}

function showTip(event) {
  const [row, column] = event.points[0].pointNumber, cell = cellText(row, column), tip = by("tip");
  const tensor = sheet().name ? ` · ${sheet().name}` : "";
  tip.innerHTML = `<b>${cell.value}</b>${escaped(statistic().title + tensor)}<br>${escaped(cell.layer)}<br>` +
    `${cell.when}<br><span>${escaped(healthy(statistic()))}</span>`;
  tip.hidden = false;
  const frame = by("map-frame").getBoundingClientRect(), mouse = event.event;
  const left = mouse.clientX - frame.left, isRight = left > frame.width / 2;
  tip.style.left = isRight ? "auto" : `${left + 16}px`;
  tip.style.right = isRight ? `${frame.width - left + 16}px` : "auto";
  const top = mouse.clientY - frame.top;
  tip.style.top = `${top > frame.height / 2 ? top - tip.offsetHeight - 12 : top + 14}px`;
}

function readOut() {
  const row = sheet().rows.indexOf(selected.layer);
  if (row < 0) return void (by("readout").textContent = `${layerName(selected.layer)} has no such tensor.`);
  const cell = cellText(row, selected.column);
  by("readout").textContent = `Chosen: ${cell.layer}, ${cell.when}: ${cell.value}.`;
}

// ---- one layer's curves ------------------------------------------------------------------------------------------------

function drawCurves() {
  const names = PANELS.includes(statistic().name) ? PANELS : [statistic().name, ...PANELS.slice(0, 5)];
  const shown = names.map(named)
    .filter((one) => one && one.sheets.some((page) => page.rows.includes(selected.layer)));
  by("curves").hidden = false;
  by("layer-name").innerHTML = escaped(layerName(selected.layer)).replaceAll(".", ".<wbr>");
  by("layer-facts").textContent = data.facts[data.layers[selected.layer]];
  const panels = by("panels");
  while (panels.children.length > shown.length) {
    Plotly.purge(panels.lastChild.lastChild);
    panels.lastChild.remove();
  }
  while (panels.children.length < shown.length) panels.append(newPanel());
  shown.forEach((one, index) => drawPanel(panels.children[index], one));
  drawLegend(shown);
}

function newPanel() {
  const panel = document.createElement("section");
  panel.className = "panel";
  panel.append(document.createElement("h3"), document.createElement("p"), document.createElement("div"));
  return panel;
}

const roles = () => [...new Set(data.statistics.flatMap((one) => one.sheets.map((page) => page.name)))];
const shownName = (name) => name || "the layer";
const colourOf = (name) => {
  const known = { input: 0, weight: 1, grad_output: 2, output: 0, grad_weight: 1, grad_input: 2, "": 0 };
  return COLOURS[name in known ? known[name] : 3 + (roles().indexOf(name) % 3)];
};

function drawLegend(shown) {
  const cast = shown.filter((one) => one.table === "casts");
  const found = (cast.length ? cast : shown).flatMap((one) => one.sheets.filter((page) => page.rows.includes(selected.layer)));
  const names = [...new Set(found.map((page) => page.name))];
  by("roles").innerHTML = names.map((name) =>
    `<span style="--accent:${colourOf(name)}">${escaped(shownName(name))}</span>`).join("");
}

function drawPanel(panel, what) {
  const [title, note, figure] = panel.children;
  title.textContent = what.title;
  const isAmax = what.name === "casts.amax";
  const hasRange = what.low !== null || what.high !== null;
  note.textContent = isAmax ? "dotted: what the scale was made for" : hasRange ? healthy(what) : what.meaning;
  const traces = what.sheets.flatMap((page) => tracesOf(what, page, isAmax));
  const isLog = ["magnitude", "ratio"].includes(what.kind);
  draw(figure, traces, layout({ margin: { l: 56, r: 8, t: 6, b: 26 }, hovermode: "x",
    font: { ...data.layout.font, size: 11.5 },
    xaxis: { title: { text: "" }, range: [data.edges[0], data.edges[columns]], nticks: 6, rangemode: "normal" },
    yaxis: { title: { text: "" }, type: isLog ? "log" : "linear", nticks: 5, rangemode: isLog ? "normal" : "tozero",
      exponentformat: "power", ...heightOf(what, traces), tickformat: what.kind === "fraction" ? "~%" : "", automargin: false },
    shapes: panelShapes(what, traces) }));
}

// A curve of zeros lies at the bottom: plotly would center it.
function heightOf(what, traces) {
  const isFlat = what.kind !== "signed" && traces.every((trace) => trace.y.every((value) => !value));
  if (what.kind === "ratio") {
    const tickvals = doublings(what, traces);
    return { tickvals, ticktext: tickvals.map((value) => written(value, "ratio")) };
  }
  return isFlat && ["fraction", "count"].includes(what.kind) ? { range: [0, 2 * (what.high || 0.5)] } : {};
}

// Powers of two that the curves and the healthy range reach, evenly apart, 1 among them.
function doublings(what, traces) {
  const reached = traces.flatMap((trace) => Array.from(trace.y)).concat(what.low, what.high).filter((value) => value > 0);
  const powers = reached.map(Math.log2).filter(Number.isFinite);
  const low = powers.reduce((one, other) => Math.min(one, other), 0);
  const high = powers.reduce((one, other) => Math.max(one, other), 0);
  const apart = Math.max(1, Math.ceil((high - low) / MOST_DOUBLINGS));
  const first = Math.ceil(low / apart), count = Math.floor(high / apart) - first + 1;
  return Array.from({ length: count }, (_, index) => 2 ** ((first + index) * apart));
}

function tracesOf(what, page, isAmax) {
  const values = curve(page, selected.layer);
  if (!values) return [];
  const x = data.first.map((first, i) => (first + data.last[i]) / 2);
  const isLog = ["magnitude", "ratio"].includes(what.kind);
  const plain = (value) => (Number.isFinite(value) && (value > 0 || !isLog) ? value : null);
  const name = shownName(page.name), line = { color: colourOf(page.name), width: 1.6 };
  const text = Array.from(values, (value) => written(value, what.kind));
  const style = { x, mode: columns < 3 ? "markers" : "lines", line, name, connectgaps: false };
  const whole = { ...style, y: Array.from(values, plain), text, hovertemplate: "%{text}" };
  const ratio = isAmax && partner("casts.stale_ratio", page.name);
  if (!ratio) return [whole];
  const made = Array.from(values, (value, i) => plain(value / ratio[i]));
  return [whole, { ...style, y: made, line: { ...line, width: 1.1, dash: "dot" }, hoverinfo: "skip" }];
}

function partner(name, sheetName) {
  const page = named(name)?.sheets.find((one) => one.name === sheetName);
  return page ? curve(page, selected.layer) : null;
}

function panelShapes(what, traces) {
  const sizes = traces.flatMap((trace) => trace.y.filter((value) => value !== null).map(Math.abs));
  const highest = Math.max(...sizes), lowest = what.kind === "ratio" ? Math.min(...sizes) : 0;
  const level = (value) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value,
    line: { color: MUTED, width: 1, dash: "dash" } });
  const isNear = (value) => value !== null && value !== 0 && Math.abs(value) < 4 * highest && Math.abs(value) > lowest / 4;
  return [...[what.low, what.high].filter(isNear).map(level), ...stepShapes()];
}

function stepShapes() {
  const target = selected.finding === null ? null : data.findings[selected.finding];
  if (!target || !columns) return [];
  const [first, last] = reach(target), [x0, x1] = [data.edges[first], data.edges[last + 1]];
  return [{ type: "rect", name: "chosen", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, line: { width: 0 },
    fillcolor: CHOSEN, opacity: 0.1, layer: "below" }];
}

// ---- the selection -----------------------------------------------------------------------------------------------------

function choose(changes) {
  const before = { ...selected };
  Object.assign(selected, changes);
  selected.sheet = Math.min(selected.sheet, statistic().sheets.length - 1);
  const isOtherMap = before.statistic !== selected.statistic || before.sheet !== selected.sheet;
  if (isOtherMap) drawMap();
  else Plotly.relayout("heat", coloured({ shapes: marks() }));
  fillMenus();
  drawCurves();
  readOut();
  shadeLoss();
}

function shadeLoss() {
  for (const figure of [by("loss"), by("gap")].filter(({ layout }) => layout)) {
    const others = (figure.layout.shapes || []).filter((one) => one.name !== "chosen");
    Plotly.relayout(figure, coloured({ shapes: [...others, ...stepShapes()] }));
  }
  document.querySelectorAll(".finding").forEach((card) =>
    card.classList.toggle("chosen", card.id === `finding-${selected.finding}`));
}

function options(select, names, chosen) {
  if (select.textContent !== names.join("")) select.replaceChildren(...names.map((name, index) => new Option(name, index)));
  select.value = chosen;
}

function fillMenus() {
  by("statistic").value = selected.statistic;
  options(by("sheet"), statistic().sheets.map((page) => page.name || "all"), selected.sheet);
  by("sheet").disabled = statistic().sheets.length < 2;
  const rows = sheet().rows;
  options(by("layer"), rows.map(layerName), rows.indexOf(selected.layer));
}

const placeOf = (target) => ({ statistic: target.statistic, sheet: target.sheet, layer: target.layer, column: reach(target)[0] });

function chooseFinding(index) {
  const target = data.findings[index];
  selected.finding = index;
  if (target.statistic === null) {
    if (data.statistics.length) choose({});
    else shadeLoss();
    return by("loss").scrollIntoView({ block: "center" });
  }
  choose(placeOf(target));
  by("map").scrollIntoView({ block: "start" });
}

const KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function moveBy(event) {
  const move = KEYS[event.key], { rows } = sheet();
  if (!move) return;
  event.preventDefault();
  const row = Math.min(rows.length - 1, Math.max(0, rows.indexOf(selected.layer) + move[0]));
  choose({ layer: rows[row], column: Math.min(columns - 1, Math.max(0, selected.column + move[1])) });
}

function listen() {
  by("statistic").addEventListener("change", (event) => {
    const next = named(event.target.value);
    const same = next.sheets.findIndex((page) => page.name === sheet().name);
    const rows = next.sheets[Math.max(0, same)].rows;
    const layer = rows.includes(selected.layer) ? selected.layer : rows[0];
    choose({ statistic: next.name, sheet: Math.max(0, same), layer });
  });
  by("sheet").addEventListener("change", (event) => choose({ sheet: Number(event.target.value) }));
  by("layer").addEventListener("change", (event) => choose({ layer: sheet().rows[Number(event.target.value)] }));
  by("heat").addEventListener("keydown", moveBy);
  by("heat").on("plotly_hover", showTip);
  by("heat").on("plotly_unhover", () => (by("tip").hidden = true));
  by("heat").on("plotly_click", (event) => {
    const [row, column] = event.points[0].pointNumber;
    choose({ layer: sheet().rows[row], column });
  });
}

// ---- values on the format's grid -----------------------------------------------------------------------------------------

const ZONES = [["flushed to zero", "var(--flushed)"], ["subnormal", "var(--subnormal)"], ["normal", "var(--series-1)"],
  ["saturated", "var(--saturated)"]];

function drawHistogram() {
  const one = data.histograms[by("histogram").value];
  const centres = one.shares.map((_, i) => one.first + (i + 0.5) * one.width);
  const zone = (x) => one.ends.filter((end) => x > end).length;
  const bars = { type: "bar", x: centres, y: one.shares, width: one.width * 0.92,
    marker: { color: centres.map((x) => ZONES[zone(x)][1]) },
    text: centres.map((x) => ZONES[zone(x)][0]), textposition: "none",
    hovertemplate: "|x| ≈ 2<sup>%{x:.1f}</sup>: %{y:.2%}<br>%{text}<extra></extra>" };
  const highest = Math.max(...one.shares, 0.01);
  const rug = { type: "scatter", mode: "markers", x: one.grid, y: one.grid.map(() => -0.035 * highest), hoverinfo: "skip",
    marker: { symbol: "line-ns-open", size: 8, color: INK, line: { width: 1 } } };
  const bounds = one.shares.length ? [one.first, one.first + one.shares.length * one.width] : []; // none of zeros alone
  const left = Math.min(...bounds, one.ends[0] - 7), right = Math.max(...bounds.map((end) => end + 1), one.ends[2] + 5);
  const walls = one.ends.map((x) => ({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1,
    line: { color: MUTED, width: 1, dash: "dot" } }));
  draw("grid", [bars, rug], layout({ hovermode: "closest", bargap: 0, margin: { l: 58, r: 12, t: 10, b: 44 }, shapes: walls,
    xaxis: { title: { text: "magnitude" }, range: [left, right], tickprefix: "2<sup>", ticksuffix: "</sup>", nticks: 12,
      rangemode: "normal" },
    yaxis: { title: { text: "share of nonzeros" }, tickformat: "~%", range: [-0.075 * highest, 1.06 * highest],
      zeroline: true, zerolinecolor: MUTED } }));
  by("zones").innerHTML = ZONES.map(([name, colour]) => `<span style="--accent:${colour}">${name}</span>`).join("");
  by("histogram-about").innerHTML = `<span><b>${escaped(one.format)}</b></span>` +
    [["zero before the cast", one.zeros], ["flushed to zero", one.flushed], ["saturated", one.saturated]]
      .map(([name, share]) => `<span>${name}: ${written(share, "fraction")}</span>`).join("");
}

// ---- begin -----------------------------------------------------------------------------------------------------------------

// Figures below the map are drawn after the rest is on the screen.
const waiting = [];

function drawWaiting() {
  if (waiting.length) waiting.shift()();
  if (waiting.length) setTimeout(drawWaiting);
  else document.documentElement.dataset.complete = Math.round(performance.now());
}

function begin() {
  if (data.statistics.length) {
    const target = data.findings.find((one) => one && one.statistic), [first] = data.statistics;
    Object.assign(selected, target ? placeOf(target) : { statistic: first.name, layer: first.sheets[0].rows[0] });
    drawMap();
    fillMenus();
    readOut();
    listen();
    waiting.push(drawCurves);
  }
  document.querySelectorAll("[data-finding]").forEach((link) => link.addEventListener("click", (event) => {
    event.preventDefault();
    chooseFinding(Number(link.dataset.finding));
  }));
  if (data.histograms.length) {
    by("histogram").addEventListener("change", drawHistogram);
    waiting.push(drawHistogram);
  }
  document.documentElement.dataset.ready = Math.round(performance.now());
  requestAnimationFrame(() => setTimeout(drawWaiting));
}

function redraw() {
  if (data.statistics.length) {
    drawMap();
    drawCurves();
  }
  if (data.histograms.length) drawHistogram();
  shadeLoss();
}

if (window.Plotly) {
  begin();
  scheme.addEventListener("change", redraw);
}
