// The report of finished runs; follows common.js.
  const off = new Set();
  hidden = (trace) => off.has(trace.legendgroup);
  const stated = (entry) => entry[9].map((place) => data.clients.texts[place]).join(" ");
  // ---- how a series looks: one colour and one marker per method, everywhere ---------------------------------------
  const DASHES = ["solid", "dash", "dot", "dashdot"]; // of a method that has the colour of an earlier one
  const LOOKS = {
    line: ({ x }, color, { symbol, index }) => ({
      mode: x.length > 1 ? "lines" : "markers", marker: { color, symbol, size: 8 },
      line: { color, width: 2.25, dash: DASHES[Math.floor(index / 8) % DASHES.length] },
    }),
    judged: (_, color, { symbol }) => ({ mode: "lines+markers", line: { color, width: 2.25 }, marker: { color, symbol, size: 8 } }),
    observer: (_, color) => ({ mode: "lines", line: { color, width: 1.25, dash: "dot" } }),
    band: (_, color) => ({ mode: "lines", fill: "toself", fillcolor: `${color}~0.16`, line: { width: 0, color }, hoverinfo: "skip" }),
    // Smaller and clearer when there are many; the outline keeps overlapping points apart.
    points: ({ x }, color, { symbol }) => ({
      mode: "markers",
      marker: { color, symbol, ...(x.length <= 60 ? { size: 9, opacity: 0.9 } : { size: 6, opacity: 0.65 }), line: { width: 0.75, color: "@card" } },
    }),
    spectrum: (_, color) => ({ mode: "lines+markers", line: { color, width: 1.75, dash: "solid" }, marker: { color, symbol: "circle", size: 6 } }),
    "low-rank": (_, color) => ({ mode: "lines+markers", line: { color, width: 1.75, dash: "dot" }, marker: { color, symbol: "circle-open", size: 6 } }),
    diagonal: () => ({ mode: "lines", line: { color: "@muted", width: 1.5, dash: "dash" }, hoverinfo: "skip" }),
  };

  function styled({ look, ...trace }) {
    const method = data.methods.find((one) => `m${one.index}` === trace.legendgroup);
    return { type: "scatter", ...trace, ...LOOKS[look](trace, `@m${method?.colour}`, method) };
  }

  for (const chart of data.charts) chart.traces = chart.traces.map(styled);
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

  const mark = (index) => document.getElementById("marks").content.children[index].cloneNode(true);

  function toggle(method) {
    if (!off.delete(method)) off.add(method);
    for (const button of document.querySelectorAll(`.legend button[data-method="${method}"]`)) {
      button.setAttribute("aria-pressed", String(!off.has(method)));
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
    statement.replaceChildren(make("p", {}, stated(entry)));
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
    list.replaceChildren(...sheet.rows.map((entry) => make("li", {}, stated(entry))));
    const sorted = clients.querySelector("th[aria-sort]");
    if (sorted) sortBy(clients, sorted.cellIndex, sorted.getAttribute("aria-sort"));
    const spent = (entry) => (typeof entry[4] === "number" ? entry[4] : -1);
    const most = Math.max(...sheet.rows.map(spent));
    const first = sheet.rows.find((entry) => spent(entry) === most);
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
    chooser.value = Math.max(0, data.clients.sheets.findIndex((sheet) => sheet.private));
    chooser.addEventListener("change", showSheet);
    finder.addEventListener("input", find);
    showSheet();
  }

  clientTable();
  legends();
  start();
