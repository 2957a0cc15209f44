// What every page of sordino shares: charts in the page's colours, data tables, sorting, themes, printing.
// The scripts of a page are joined inside one function, so that nothing of them is global.
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const dash = "–";

  let hidden = () => false; // whether a trace is switched off

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
    const traces = chart.traces.map((trace) => ({ ...resolved(trace), visible: !hidden(trace) }));
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

  // ---- the charts' data as tables, made when asked for --------------------------------------------------------------
  function dataTable(details) {
    if (details.querySelector("table")) return;
    const chart = data.charts.find((one) => one.id === details.dataset.chart);
    const series = chart.traces.filter((trace) => trace.meta !== "band" && trace.legendgroup);
    const named = series.some((trace) => trace.text);
    const lead = chart.lead ?? "Method";
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

  // ---- theme and print -----------------------------------------------------------------------------------------------
  let before = null; // what to return to after printing
  const themeButton = document.getElementById("theme");

  function nameTheme() {
    themeButton.textContent = root.dataset.theme === "dark" ? "Light theme" : "Dark theme";
  }

  function setTheme(theme, size) {
    root.dataset.theme = theme;
    nameTheme();
    for (const chart of data.charts) draw(chart, size);
  }


  // On paper: light, everything unfolded, and charts as wide as half a page.
  function printing() {
    const folded = [...document.querySelectorAll("details.printed")];
    addEventListener("beforeprint", () => {
      before = { theme: root.dataset.theme, open: folded.map((one) => one.open) };
      for (const one of folded) one.open = true;
      setTheme("light", { width: 320, height: 250 });
    });
    addEventListener("afterprint", () => {
      const { theme, open } = before;
      before = null;
      folded.forEach((one, at) => { one.open = open[at]; });
      setTheme(theme);
    });
  }

  // The first charts are drawn at once, the others one by one after the page has been shown: it never stands still.
  let started = false;

  function drawRest(charts) {
    if (charts.length === 0) { root.dataset.ready = "true"; return; }
    draw(charts[0]);
    setTimeout(() => drawRest(charts.slice(1)));
  }

  function start() {
    started = true;
    document.querySelectorAll("table.sortable").forEach(sortable);
    for (const details of document.querySelectorAll("details.data")) {
      details.addEventListener("toggle", () => { if (details.open) dataTable(details); });
    }
    nameTheme();
    data.charts.slice(0, 2).forEach((chart) => draw(chart));
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
    setTimeout(() => drawRest(data.charts.slice(2)));
  }
