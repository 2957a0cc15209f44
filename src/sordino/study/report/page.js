"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const hidden = new Set();
  const whole = (text) => text.replace(/[\ue000-\ue0ff]/g, (sign) => data.clients.phrases[sign] ?? sign);
  data.clients.texts = data.clients.texts.map(whole);
  const dash = "–";

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // ---- charts ------------------------------------------------------------------------------------------------
  // Colours arrive as tokens ("@m0", "@m0~0.16") and are read from the style sheet once for each theme.
  const paints = { light: new Map(), dark: new Map() };

  function paint(token) {
    const known = paints[root.dataset.theme];
    if (!known.has(token)) {
      const [name, alpha] = token.slice(1).split("~");
      const hex = getComputedStyle(root).getPropertyValue(`--${name}`).trim();
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      known.set(token, alpha === undefined ? hex : `rgba(${r},${g},${b},${alpha})`);
    }
    return known.get(token);
  }

  function resolved(value) {
    if (typeof value === "string") return value.startsWith("@") ? paint(value) : value;
    if (Array.isArray(value)) return value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, resolved(one)]));
    }
    return value;
  }

  function axis(spec) {
    const { title, ...rest } = spec;
    return {
      gridcolor: paint("@line"), linecolor: paint("@line"), zerolinecolor: paint("@line"),
      tickfont: { color: paint("@muted"), size: 12 }, exponentformat: "power", ...(rest.type === "log" ? { dtick: "D2", tickformat: "~g" } : {}), ...rest,
    };
  }

  // Margins are set, not measured: measuring would draw every chart twice. The y title stands level above its axis.
  function draw(chart, size = {}) {
    const traces = chart.traces.map((trace) => ({ ...resolved(trace), visible: !hidden.has(trace.legendgroup) }));
    const soft = { size: 13, color: paint("@muted") };
    const label = { text: chart.y.title, font: soft, showarrow: false, xref: "paper", yref: "paper" };
    const layout = {
      autosize: size.width === undefined, showlegend: false, hovermode: chart.hovermode,
      dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
      paper_bgcolor: paint("@card"), plot_bgcolor: paint("@card"),
      margin: { l: 52, r: 14, t: 34, b: chart.x.ticktext ? 84 : 48 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: paint("@ink") },
      hoverlabel: { bgcolor: paint("@card"), bordercolor: paint("@muted"), font: { color: paint("@ink") }, namelength: -1 },
      annotations: [{ ...label, x: 0, y: 1, xanchor: "left", yanchor: "bottom", xshift: -46, yshift: 6 }],
      xaxis: { title: { text: chart.x.title, font: soft, standoff: 6 }, ...axis(chart.x) },
      yaxis: axis(chart.y), ...size,
    };
    // No mode bar: one of its buttons would send the chart to a service on the network.
    return Plotly.react(`chart-${chart.id}`, traces, layout, { responsive: true, displayModeBar: false });
  }

  function savePicture(button) {
    const size = { format: "png", width: 900, height: 560, scale: 2 };
    Plotly.downloadImage(`chart-${button.dataset.save}`, { ...size, filename: `sordino-${button.dataset.save}` });
  }

  // ---- switches of the methods: one state for all charts ---------------------------------------------------------
  function legends() {
    for (const box of document.querySelectorAll(".legend")) {
      const chart = data.charts.find((one) => one.id === box.dataset.chart);
      if (chart.curves) { curveSwitches(box, chart); continue; }
      const shown = new Set(chart.traces.map((trace) => trace.legendgroup));
      const methods = data.methods.filter((method) => shown.has(`m${method.index}`));
      if (data.methods.length < 2) continue;
      box.append(...methods.map((method) => {
        const button = make("button", { type: "button", "aria-pressed": "true", "data-method": `m${method.index}` });
        button.append(mark(method.index), method.label);
        button.addEventListener("click", () => toggle(button.dataset.method));
        return button;
      }));
    }
  }

  function mark(index) {
    const template = document.createElement("template");
    template.innerHTML = data.marks[index % data.marks.length];
    return template.content;
  }

  function toggle(method) {
    if (!hidden.delete(method)) hidden.add(method);
    for (const button of document.querySelectorAll(`.legend button[data-method="${method}"]`)) {
      button.setAttribute("aria-pressed", String(!hidden.has(method)));
    }
    for (const chart of data.charts) if (chart.traces.some((trace) => trace.legendgroup === method)) draw(chart);
  }

  // ---- clients' curves: one method at a time, every client on request ----------------------------------------------
  const TONES = { strictest: ["@ink", "solid"], middle: ["@muted", "dash"], loosest: ["@link", "dot"] };
  const tone = (name) => TONES[name.split(",")[0]] ?? ["@ink", "solid"];

  function curveTraces(chart) {
    const { curves, scale, method, everyone } = chart;
    const { rounds: x, groups, clients } = curves[method];
    const up = (values) => values.map((value) => (value === null ? null : value / scale));
    const series = { type: "scatter", mode: x.length > 1 ? "lines" : "markers", x, legendgroup: "curves" };
    const each = everyone ? clients.map(([name, group, budget, values]) => ({
      ...series, name, y: up(values), text: x.map(() => name), line: { color: `${tone(group)[0]}~0.4`, width: 1 },
      hovertemplate: `%{text} (ε ${budget})<br>round %{x}: %{y:.1%}<extra></extra>`,
    })) : [];
    const means = groups.map(([name, values]) => {
      const [color, dash] = tone(name);
      return { ...series, name, y: up(values), line: { color, dash, width: 3 }, marker: { color, size: 8 },
        hovertemplate: `${name}<br>round %{x}: %{y:.1%}<extra></extra>` };
    });
    return [...each, ...means];
  }

  function curveSwitches(box, chart) {
    const redraw = () => { chart.traces = curveTraces(chart); draw(chart); renewTable(chart); };
    const choices = chart.curves.map((curve, at) => {
      const button = make("button", { type: "button", "aria-pressed": String(at === chart.method) }, mark(curve.index), curve.label);
      button.addEventListener("click", () => {
        chart.method = at;
        choices.forEach((one, place) => one.setAttribute("aria-pressed", String(place === at)));
        key.replaceChildren(...keyOf(chart));
        redraw();
      });
      return button;
    });
    const every = make("button", { type: "button", class: "every", "aria-pressed": "false" }, "Every client");
    every.addEventListener("click", () => {
      chart.everyone = !chart.everyone;
      every.setAttribute("aria-pressed", String(chart.everyone));
      redraw();
    });
    const key = make("p", { class: "key" }, ...keyOf(chart));
    box.setAttribute("aria-label", "Choose a method, show every client");
    box.append(...(choices.length > 1 ? choices : []), every, key);
    chart.traces = curveTraces(chart);
  }

  function keyOf(chart) {
    return chart.curves[chart.method].groups.map(([name]) => {
      return make("span", {}, make("i", { class: `stroke ${tone(name)[1]}` }), name);
    });
  }

  function renewTable(chart) {
    const details = document.querySelector(`details.data[data-chart="${chart.id}"]`);
    details.querySelector(".box")?.remove();
    if (details.open) dataTable(details);
  }

  // ---- the charts' data as tables, made when asked for --------------------------------------------------------------
  function dataTable(details) {
    if (details.querySelector("table")) return;
    const chart = data.charts.find((one) => one.id === details.dataset.chart);
    const series = chart.traces.filter((trace) => trace.meta !== "band" && trace.legendgroup);
    const named = series.some((trace) => trace.text);
    const lead = chart.curves ? "Series" : "Method";
    const across = chart.placed ? [] : [chart.x.title];
    const heads = [lead, ...(named ? ["Client"] : []), ...across, chart.y.title];
    const body = make("tbody");
    for (const trace of series) {
      trace.x.forEach((x, at) => {
        const values = [trace.name, ...(named ? [trace.text?.[at]] : []), ...(chart.placed ? [] : [x]), trace.y[at]];
        body.append(make("tr", {}, ...values.map(plainCell)));
      });
    }
    const head = make("tr", {}, ...heads.map((name) => {
      return make("th", { scope: "col" }, make("button", { type: "button" }, name));
    }));
    const table = make("table", { class: "sortable" }, make("thead", {}, head), body);
    sortable(table);
    const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Data of the chart" }, table);
    details.append(make("div", { class: "box" }, scroll));
  }

  function plainCell(value) {
    const unescaped = String(value ?? dash).replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
    return make("td", typeof value === "number" ? { "data-v": value } : {}, unescaped);
  }

  // ---- sorting: by click, by Enter or Space on the heading ---------------------------------------------------------
  function sortable(table) {
    table.querySelectorAll("thead th").forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", direction);
        sortBy(table, column, direction);
      });
    });
  }

  function sortBy(table, column, direction) {
    const body = table.tBodies[0];
    const sign = direction === "ascending" ? 1 : -1;
    const keyed = [...body.rows].map((row) => {
      const cell = row.cells[column];
      const text = cell.textContent.trim();
      const value = cell.dataset.v === undefined ? null : Number(cell.dataset.v);
      return { row, text, value, empty: text === dash };
    });
    keyed.sort((a, b) => {
      if (a.empty !== b.empty) return a.empty ? 1 : -1; // what is missing goes last in both directions
      if (a.value !== null && b.value !== null) return sign * (a.value - b.value);
      return sign * a.text.localeCompare(b.text, "en", { numeric: true });
    });
    body.append(...keyed.map((one) => one.row));
  }

  // ---- client by client ----------------------------------------------------------------------------------------------
  const clients = document.getElementById("clients");
  const statement = document.getElementById("statement");
  const chooser = document.getElementById("sheet");
  const finder = document.getElementById("find");
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const number = (value) => (typeof value === "number" ? digits.format(value) : value ?? dash);

  const exponential = (value) => Number(value.toPrecision(2)).toExponential().replace("-", "−");

  function numberCell(value, shown, extra = "") {
    const size = value === "∞" ? { "data-v": "Infinity" } : value === null ? {} : { "data-v": value };
    return make("td", { class: `num ${extra}`, ...size }, shown ?? number(value));
  }

  // The round after which a budget pays for no more; words sort after every round.
  function endCell(end) {
    if (typeof end === "number") return numberCell(end, end === 0 ? "never paid" : String(end), "wide");
    return make("td", { class: "num wide", ...(end === null ? {} : { "data-v": "Infinity" }) }, end ?? dash);
  }

  function usedCell(share) {
    if (share === null) return make("td", { class: "num" }, dash);
    const bar = make("i", { style: `width:${Math.min(100, 100 * share).toFixed(1)}%` });
    const meter = make("span", { class: share > 1.000001 ? "meter over" : "meter", "aria-hidden": "true" }, bar);
    return make("td", { class: "num", "data-v": share }, meter, `${(100 * share).toFixed(1)} %`);
  }

  function clientRow(entry) {
    const [name, records, budget, delta, spent, share, replaced, released, standing, , end] = entry;
    const texts = data.clients.texts;
    const word = texts[standing];
    const calm = word === "within budget" || word === "public data";
    const button = make("button", { type: "button" }, name);
    button.addEventListener("click", () => say(entry));
    return make(
      "tr", { "data-client": name },
      make("td", {}, button), numberCell(records, undefined, "wide"), numberCell(budget),
      numberCell(delta, delta === null ? dash : exponential(delta), "wide"), numberCell(spent), usedCell(share),
      numberCell(replaced), endCell(end), make("td", { class: "wide releases" }, texts[released]),
      make("td", {}, make("span", { class: calm ? "yes" : "no" }, word)),
    );
  }

  function say(entry, lead) {
    const standing = data.clients.texts[entry[8]];
    const calm = standing === "within budget" || standing === "public data";
    statement.classList.toggle("bad", !calm);
    statement.replaceChildren(make("p", {}, data.clients.texts[entry[9]]));
    if (lead && calm) statement.prepend(make("p", { class: "lead" }, lead));
    for (const row of clients.tBodies[0].rows) {
      if (row.dataset.client === entry[0]) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    if (!lead && statement.getBoundingClientRect().top < 0) statement.scrollIntoView({ block: "center" });
  }

  function showSheet() {
    const sheet = data.clients.sheets[chooser.value];
    clients.tBodies[0].replaceChildren(...sheet.rows.map(clientRow));
    const list = document.querySelector("#statements ul");
    list.replaceChildren(...sheet.rows.map((entry) => make("li", {}, data.clients.texts[entry[9]])));
    const sorted = clients.querySelector("th[aria-sort]");
    if (sorted) sortBy(clients, sorted.cellIndex, sorted.getAttribute("aria-sort"));
    const first = sheet.rows.find((entry) => entry[0] === sheet.first);
    if (first) say(first, "The loosest promise of this run:");
    else statement.replaceChildren(make("p", {}, "This result records no clients."));
    find();
  }

  function find() {
    const wanted = finder.value.trim().toLowerCase();
    for (const row of clients.tBodies[0].rows) row.hidden = !row.dataset.client.toLowerCase().includes(wanted);
  }

  function clientTable() {
    chooser.append(...data.clients.sheets.map((sheet, at) => make("option", { value: at }, sheet.label)));
    chooser.value = data.clients.shown;
    chooser.addEventListener("change", showSheet);
    finder.addEventListener("input", find);
    showSheet();
  }

  // ---- theme and print -----------------------------------------------------------------------------------------------
  let before = null; // what to return to after printing
  const themeButton = document.getElementById("theme");

  function setTheme(theme, size) {
    root.dataset.theme = theme;
    themeButton.textContent = theme === "dark" ? "Light theme" : "Dark theme";
    for (const chart of data.charts) draw(chart, size);
  }

  // On paper: light, every statement, and charts as wide as half a page.
  function printing() {
    const statements = document.getElementById("statements");
    addEventListener("beforeprint", () => {
      before = { theme: root.dataset.theme, open: statements.open };
      statements.open = true;
      setTheme("light", { width: 320, height: 250 });
    });
    addEventListener("afterprint", () => {
      const { theme, open } = before;
      before = null;
      statements.open = open;
      setTheme(theme);
    });
  }

  clientTable();
  legends();
  document.querySelectorAll("table.sortable").forEach(sortable);
  for (const details of document.querySelectorAll("details.data")) {
    details.addEventListener("toggle", () => { if (details.open) dataTable(details); });
  }
  setTheme(root.dataset.theme);
  themeButton.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    const theme = event.matches ? "dark" : "light";
    if (before) before.theme = theme;
    else setTheme(theme);
  });
  for (const button of document.querySelectorAll("button[data-save]")) {
    button.addEventListener("click", () => savePicture(button));
  }
  printing();
  root.dataset.ready = "true";
})();
