// The plan's trade-off explorer; follows common.js.
  const explore = data.explore;
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const shown = (value) => (!Number.isFinite(value) ? "∞" : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? Number(value.toPrecision(3)).toExponential().replace("-", "−") : digits.format(value));
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const WAYS = { size: ["by size", "@m0", "solid"], budget: ["by ε", "@m1", "dash"], least: ["least noise", "@m2", "dot"] };

  // ---- from the grid to any ε --------------------------------------------------------------------------------------
  function between(grid, values, at, log) {
    const f = log ? Math.log : (value) => value;
    let i = grid.findIndex((one) => one >= at);
    i = i < 0 ? grid.length - 1 : Math.max(1, i);
    const share = (Math.log(at) - Math.log(grid[i - 1])) / (Math.log(grid[i]) - Math.log(grid[i - 1]));
    const mixed = f(values[i - 1]) + share * (f(values[i]) - f(values[i - 1]));
    return log ? Math.exp(mixed) : mixed;
  }

  // z of a client under ε; where everyone follows the strictest budget, under that one.
  function noiseAt(place, epsilon) {
    const client = explore.clients[place];
    const others = explore.strictest ? explore.clients.map((one, at) => (at === place ? Infinity : one.epsilon ?? Infinity)) : [];
    return between(client.grid, client.noises, Math.min(epsilon, ...others), true);
  }

  // How many times noisier every client is than planned when one of them has another ε.
  function factors(place, epsilon) {
    const times = noiseAt(place, epsilon) / explore.clients[place].noise;
    return explore.clients.map((one, at) => (at === place || (explore.strictest && one.noise > 0) ? times : 1));
  }

  function weights(way, place, epsilon, noise) {
    const raw = explore.clients.map((one, at) => {
      if (way === "size") return one.records;
      if (way === "budget") return at === place ? epsilon : one.epsilon ?? Infinity;
      return 1 / (one.deviation * noise[at]) ** 2;
    });
    const open = raw.map((value) => (value === Infinity ? 1 : 0));
    const kept = sum(open) > 0 ? open : raw;
    const total = sum(kept);
    return kept.map((value) => value / total);
  }

  // Deviation of the noise on one coordinate of the combined update, each client's part of its variance, the bound.
  function combined(way, place, epsilon) {
    const noise = factors(place, epsilon);
    const w = weights(way, place, epsilon, noise);
    const parts = explore.clients.map((one, at) => (w[at] * one.deviation * noise[at]) ** 2);
    const total = sum(parts);
    const sizes = sum(explore.clients.map((one) => one.records));
    const bias = sum(explore.clients.map((one, at) => Math.abs(w[at] - one.records / sizes)));
    const privacy = explore.dimension * sum(explore.clients.map((one, at) => w[at] ** 2 * one.factor * noise[at] ** 2));
    const bound = 0.5 * (bias + Math.sqrt(bias ** 2 + 2 * Math.sqrt(explore.iterations) * privacy));
    return { deviation: Math.sqrt(total), parts: parts.map((part) => part / total), bound, weight: w[place] };
  }

  function drawn(place, epsilon) {
    const grid = explore.clients[place].grid;
    const [p, bound, noise] = explore.drawn.figures[place].map((values) => between(grid, values, epsilon, true));
    return { p, bound, noise };
  }

  // ---- charts ------------------------------------------------------------------------------------------------------
  const frame = (id, y, more = {}) => (
    { id, traces: [], x: { title: "the client's ε", type: "log" }, y, hovermode: "closest", lead: "Series", ...more });
  if (explore) data.charts.unshift(
    frame("noise", { title: "noise multiplier z", type: "log" }),
    frame("aggregate", { title: "deviation of a coordinate", type: "log" }),
    frame("bound", { title: "bound (Theorem 2)" }),
    explore.drawn ? frame("chance", { title: "chance per draw" })
      : frame("shares", { title: "share of the noise", tickformat: ".0%" }, { x: explore.axis, placed: true }),
  );
  const chartOf = (id) => data.charts.find((one) => one.id === id);
  const curve = (name, place, y, [color, dash]) => ({
    type: "scatter", mode: "lines", name, legendgroup: "curve", x: explore.clients[place].grid, y, line: { color, dash, width: 2.25 },
    hovertemplate: `${name}<br>ε %{x:.3g}: %{y:.3g}<extra></extra>`,
  });
  const dot = (name, x, y, color, symbol) => ({
    type: "scatter", mode: "markers", name, x: [x], y: [y], hovertemplate: `${name}<br>ε %{x:.3g}: %{y:.3g}<extra></extra>`,
    marker: { color, symbol, size: 11, line: { width: 1.5, color: "@card" } },
  });

  function noiseChart(place, epsilon) {
    const client = explore.clients[place];
    chartOf("noise").traces = [
      curve("noise multiplier z", place, client.grid.map((at) => noiseAt(place, at)), ["@m0", "solid"]),
      dot("as planned", client.epsilon, client.noise, "@muted", "circle"),
      dot("chosen", epsilon, noiseAt(place, epsilon), "@m1", "diamond"),
    ];
  }

  function sumCharts(place, epsilon) {
    const ways = explore.drawn ? [] : Object.entries(WAYS);
    const found = ways.map(([way, style]) => [way, style, explore.clients[place].grid.map((at) => combined(way, place, at)), combined(way, place, epsilon)]);
    for (const [id, key] of [["aggregate", "deviation"], ["bound", "bound"]]) {
      chartOf(id).traces = found.flatMap(([, [name, color, dash], line, now]) => [
        curve(name, place, line.map((one) => one[key]), [color, dash]), dot(`${name}, chosen`, epsilon, now[key], color, "diamond"),
      ]);
    }
    if (!explore.drawn) return;
    const [chance, bound, noise] = explore.drawn.figures[place];
    const now = drawn(place, epsilon);
    for (const [id, values, at] of [["aggregate", noise, now.noise], ["bound", bound, now.bound], ["chance", chance, now.p]]) {
      chartOf(id).traces = [curve(explore.drawn.rule, place, values, ["@m0", "solid"]), dot("chosen", epsilon, at, "@m1", "diamond")];
    }
  }

  // A logarithmic axis over a narrow range has no round numbers to label.
  function fitAxis(id) {
    const values = chartOf(id).traces.flatMap((trace) => trace.y);
    chartOf(id).y.type = Math.max(...values) > 5 * Math.min(...values) ? "log" : "linear";
  }

  function shareChart(place, epsilon) {
    const chart = chartOf("shares");
    if (!chart) return;
    const parts = combined(explore.follows ?? "size", place, epsilon).parts;
    const order = explore.order;
    chart.traces = [{
      type: "bar", name: "share of the noise", legendgroup: "curve", x: order.map((_, at) => at), y: order.map((at) => parts[at]),
      text: order.map((at) => data.names[at]), textposition: "none", hovertemplate: "%{text}: %{y:.1%}<extra></extra>",
      marker: { color: "@m0", opacity: order.map((at) => (at === place ? 1 : 0.45)) },
    }];
  }

  // ---- the explorer ------------------------------------------------------------------------------------------------
  const who = document.getElementById("who");
  const slider = document.getElementById("slider");
  const entry = document.getElementById("epsilon");
  const [least, most] = explore ? explore.range : [];
  const toEpsilon = (value) => least * (most / least) ** (value / 1000);
  const toSlider = (epsilon) => Math.round((1000 * Math.log(epsilon / least)) / Math.log(most / least));
  let epsilon = null;

  function tile(name, value, detail) {
    const figure = make("span", { class: "figure" }, value);
    return make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, figure, make("span", {}, detail)));
  }

  function tell(place) {
    const client = explore.clients[place];
    const noise = noiseAt(place, epsilon);
    const times = noise / client.noise;
    const certain = 100 / (1 + Math.exp(-epsilon));
    const change = Math.abs(times - 1) < 0.005 ? "as much noise as planned" : times > 1
      ? `${shown(times)} times the planned noise` : `${shown(1 / times)} times less noise than planned`;
    document.getElementById("told").textContent = `With ε = ${shown(epsilon)} (planned: ${shown(client.epsilon)}) ${client.name} adds ${change}. ` +
      `Someone undecided about one record could become ${certain > 99.95 ? "all but certain" : `at most ${certain.toFixed(1)} % sure`}.`;
    const ratio = client.ratio * times;
    const tiles = [
      tile("Noise multiplier z", shown(noise), `planned ${shown(client.noise)}`),
      tile("Noise over largest signal", `${shown(ratio)} ×`, ratio > 10 ? "its update is mostly noise" : `planned ${shown(client.ratio)} ×`),
    ];
    if (explore.drawn) {
      const now = drawn(place, epsilon);
      const before = drawn(place, client.epsilon);
      tiles.push(
        tile("Drawn per round", shown(now.p * explore.drawn.select), `planned ${shown(before.p * explore.drawn.select)}, of ${explore.drawn.select}`),
        tile("Noise on the aggregate", shown(now.noise), `planned ${shown(before.noise)}, a step`),
        tile("Bound", shown(now.bound), `planned ${shown(before.bound)}`),
      );
    } else {
      const way = explore.follows ?? "size";
      const [now, before] = [combined(way, place, epsilon), combined(way, place, client.epsilon)];
      tiles.push(
        tile("Takes part", `${client.turns} turns`, `in ${explore.rounds} rounds`),
        tile("Its weight", `${shown(100 * now.weight)} %`, `${WAYS[way][0]}, planned ${shown(100 * before.weight)} %`),
        tile("Noise on the aggregate", shown(now.deviation), `${WAYS[way][0]}, planned ${shown(before.deviation)}`),
        tile("Bound", shown(now.bound), `planned ${shown(before.bound)}`),
      );
    }
    document.getElementById("figures").replaceChildren(...tiles);
  }

  function show() {
    const place = Number(who.value);
    tell(place);
    noiseChart(place, epsilon);
    sumCharts(place, epsilon);
    fitAxis("aggregate");
    shareChart(place, epsilon);
    if (started) for (const chart of data.charts.filter((one) => !one.fixed)) { draw(chart); renew(chart); }
  }

  function keys() {
    if (explore.drawn) return;
    for (const box of document.querySelectorAll('.legend[data-chart="aggregate"], .legend[data-chart="bound"]')) {
      box.removeAttribute("role");
      box.removeAttribute("aria-label");
      box.append(make("p", { class: "key" }, ...Object.entries(WAYS).map(([way, [name, color, dash]]) => {
        const stroke = make("i", { class: `stroke ${dash}`, style: `border-color: var(--${color.slice(1)})` });
        return make("span", {}, stroke, way === explore.follows ? `${name} (this method)` : name);
      })));
    }
  }

  function renew(chart) {
    const details = document.querySelector(`details.data[data-chart="${chart.id}"]`);
    details.querySelector(".box")?.remove();
    if (details.open) dataTable(details);
  }

  function choose(value) {
    epsilon = Math.min(most, Math.max(least, value));
    slider.value = toSlider(epsilon);
    slider.setAttribute("aria-valuetext", `ε = ${shown(epsilon)}`);
    entry.value = Number(epsilon.toPrecision(3));
    show();
  }

  const planned = () => explore.clients[Number(who.value)].epsilon;

  if (explore) {
    explore.clients.forEach((client, place) => {
      if (client.noises) who.append(make("option", { value: place }, `${client.name} (ε ${shown(client.epsilon)})`));
    });
    who.addEventListener("change", () => choose(planned()));
    slider.addEventListener("input", () => choose(toEpsilon(Number(slider.value))));
    entry.addEventListener("change", () => { if (Number(entry.value) > 0) choose(Number(entry.value)); else choose(epsilon); });
    document.getElementById("reset").addEventListener("click", () => choose(planned()));
    for (const button of document.querySelectorAll("button[data-client]")) {
      button.addEventListener("click", () => {
        who.value = button.dataset.client;
        choose(planned());
        document.getElementById("explorer").scrollIntoView();
        slider.focus({ preventScroll: true });
      });
    }
    keys();
    choose(planned());
  }
  start();
