// The plan's trade-off explorer; follows common.js and sharing.js.
  const explore = data.explore;
  const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const shown = (value) => (!Number.isFinite(value) ? "∞" : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    ? Number(value.toPrecision(3)).toExponential().replace("-", "−") : digits.format(value));
  const sharing = explore?.sharing ?? null;
  const WAYS = sharing ? { shared: ["noise shared", "@m0", "solid"] }
    : { size: ["by size", "@m0", "solid"], budget: ["by ε", "@m1", "dash"], least: ["least noise", "@m2", "dot"] };

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

  // ---- shared noise; nearest and balance are in sharing.js ----------------------------------------------------------
  const honest = (lost) => Math.max(1, sharing.sites - lost);

  // How many times more noise repeated rounds ask for, with so many lost sites: z grows with the root of the turns.
  const repeats = (place, lost) => {
    const { turns } = explore.clients[place];
    return turns > 0 ? Math.sqrt((turns - sharing.dropouts + lost) / turns) : 1;
  };

  // What the sum is like under one client's ε, with c sites that may conspire and d that may be lost.
  function summed(place, epsilon, c, d) {
    const times = noiseAt(place, epsilon) / sharing.needs[place];
    const able = sharing.needs.map((need, at) => at).filter((at) => sharing.needs[at] !== null);
    const needs = able.map((at) => sharing.needs[at] * repeats(at, d) * (at === place || explore.strictest ? times : 1));
    const rest = sum(able.map((at) => sharing.shares[at]));
    const most = able.map((at, i) => sharing.reach[at] / needs[i]);
    const ratio = sharing.sites / honest(c + d);
    const [w, level] = balance(most, able.map((at) => sharing.shares[at] / rest), sharing.spread, ratio / sharing.rounds);
    const weights = sharing.shares.slice();
    able.forEach((at, i) => { weights[at] = w[i] * rest; });
    const noise = level * rest * Math.sqrt(ratio) * sharing.stretch;
    const own = able.indexOf(place);
    return { weights, noise, deviation: noise * sharing.scale, z: (level * sharing.reach[place]) / w[own], need: needs[own] };
  }

  // ε that a multiplier pays for, by the client's grid; null below it.
  function epsilonOf(place, z) {
    const { grid, noises } = explore.clients[place];
    if (z < noises[noises.length - 1]) return null;
    return z > noises[0] ? grid[0] : between([...noises].reverse(), [...grid].reverse(), z, true);
  }

  function sharedAt(place, epsilon) {
    const found = summed(place, epsilon, colluders, dropouts);
    const sizes = sum(explore.clients.map((one) => one.records));
    const bias = sum(explore.clients.map((one, at) => Math.abs(found.weights[at] - one.records / sizes)));
    const privacy = (explore.dimension * found.noise ** 2) / explore.rounds;
    const bound = 0.5 * (bias + Math.sqrt(bias ** 2 + 2 * Math.sqrt(explore.iterations) * privacy));
    return { ...found, parts: found.weights, bound, weight: found.weights[place] };
  }

  // Deviation of the noise on one coordinate of the combined update, each client's part of its variance, the bound.
  function combined(way, place, epsilon) {
    if (sharing) return sharedAt(place, epsilon);
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
      : frame("shares", { title: sharing ? "weight" : "share of the noise", tickformat: ".0%" }, { x: explore.axis, placed: true }),
    ...(sharing ? [frame("colluders", { title: "deviation of a coordinate", rangemode: "tozero" }, { x: { title: "sites that conspire or are lost" } })] : []),
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

  // z that the client's budget asks for, as planned.
  const needed = (place) => (sharing ? sharing.needs[place] : explore.clients[place].noise);

  function noiseChart(place, epsilon) {
    const client = explore.clients[place];
    chartOf("noise").traces = [
      curve("noise multiplier z", place, client.grid.map((at) => noiseAt(place, at)), ["@m0", "solid"]),
      dot("as planned", client.epsilon, needed(place), "@muted", "circle"),
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
      type: "bar", name: sharing ? "weight" : "share of the noise", legendgroup: "curve", x: order.map((_, at) => at), y: order.map((at) => parts[at]),
      text: order.map((at) => data.names[at]), textposition: "none", hovertemplate: "%{text}: %{y:.1%}<extra></extra>",
      marker: { color: "@m0", opacity: order.map((at) => (at === place ? 1 : 0.45)) },
    }];
  }

  function colludersChart(place, epsilon) {
    const chart = chartOf("colluders");
    if (!chart) return;
    const step = Math.max(1, Math.ceil(sharing.sites / 25));
    const counts = [...Array(sharing.sites).keys()].filter((one) => one % step === 0 || one === sharing.sites - 1);
    const line = (name, y, color, dash) => ({
      type: "scatter", mode: "lines", name, legendgroup: "curve", x: counts, y, line: { color, dash, width: 2.25 },
      hovertemplate: `${name}<br>%{x} sites: %{y:.3g}<extra></extra>`,
    });
    const chosen = dot("chosen", colluders + dropouts, summed(place, epsilon, colluders, dropouts).deviation, "@m1", "diamond");
    chart.traces = [
      line("noise shared", counts.map((count) => summed(place, epsilon, Math.max(0, count - dropouts), Math.min(count, dropouts)).deviation), "@m0", "solid"),
      line("noise per site, as planned", counts.map(() => sharing.noise_per_site * sharing.scale), "@muted", "dash"),
      { ...chosen, hovertemplate: "chosen<br>%{x} sites: %{y:.3g}<extra></extra>" },
    ];
  }

  // ---- the explorer ------------------------------------------------------------------------------------------------
  const who = document.getElementById("who");
  const slider = document.getElementById("slider");
  const entry = document.getElementById("epsilon");
  const [least, most] = explore ? explore.range : [];
  const toEpsilon = (value) => least * (most / least) ** (value / 1000);
  const toSlider = (epsilon) => Math.round((1000 * Math.log(epsilon / least)) / Math.log(most / least));
  let epsilon = null;
  let [colluders, dropouts] = sharing ? [sharing.colluders, sharing.dropouts] : [0, 0];

  function tile(name, value, detail) {
    const figure = make("span", { class: "figure" }, value);
    return make("div", { class: "tile" }, make("dt", {}, name), make("dd", {}, figure, make("span", {}, detail)));
  }

  function tellShared(place, now, before) {
    const share = Math.sqrt(honest(colluders + dropouts));
    const alone = epsilonOf(place, now.z / share / repeats(place, dropouts));
    const less = sharing.noise_per_site / now.noise;
    document.getElementById("trusted").textContent = share === 1
      ? "Nothing is shared: every site adds all of its noise, which holds against the server and all other sites together."
      : `Promises hold ${sharing.words[colluders]}${dropouts ? `, and rounds with ${dropouts} lost ${dropouts > 1 ? "sites" : "site"} are paid for` : ""}.`;
    return [
      tile("Noise multiplier z", shown(now.z), `its budget needs ${shown(now.need)}`),
      tile("Its weight", `${shown(100 * now.weight)} %`, `planned ${shown(100 * before.weights[place])} %`),
      tile("Noise on the aggregate", shown(now.deviation), `planned ${shown(before.deviation)}`),
      tile("Against noise per site", less >= 1 ? `${shown(less)} × less` : `${shown(1 / less)} × more`, `per site, as planned: ${shown(sharing.noise_per_site * sharing.scale)}`),
      tile("If all others conspire", alone === null ? `ε > ${shown(explore.range[1])}` : `ε ≈ ${shown(alone)}`, "its own share of the noise alone"),
      tile("Bound", shown(now.bound), "noise and bias together"),
    ];
  }

  function tell(place) {
    const client = explore.clients[place];
    const noise = noiseAt(place, epsilon);
    const times = noise / needed(place);
    const certain = 100 / (1 + Math.exp(-epsilon));
    const change = Math.abs(times - 1) < 0.005 ? "as much noise as planned" : times > 1
      ? `${shown(times)} times the planned noise` : `${shown(1 / times)} times less noise than planned`;
    const does = sharing ? "asks for" : "adds";
    document.getElementById("told").textContent = `With ε = ${shown(epsilon)} (planned: ${shown(client.epsilon)}) ${client.name} ${does} ${change}. ` +
      `Someone undecided about one ${explore.unit} could become ${certain > 99.95 ? "all but certain" : `at most ${certain.toFixed(1)} % sure`}.`;
    if (sharing) {
      const before = summed(place, client.epsilon, sharing.colluders, sharing.dropouts);
      document.getElementById("figures").replaceChildren(...tellShared(place, sharedAt(place, epsilon), before));
      return;
    }
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
    colludersChart(place, epsilon);
    if (started) for (const chart of data.charts.filter((one) => !one.fixed)) { draw(chart); renew(chart); }
  }

  function keys() {
    if (explore.drawn || sharing) return;
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

  // At most n − 1 sites conspire or are lost: a site knows that its own share is there.
  const counts = ["colluders", "dropouts"].map((id) => document.getElementById(id));
  function trust(c, d) {
    const most = sharing.sites - 1;
    colluders = Math.min(most, Math.max(0, c));
    dropouts = Math.min(most - colluders, Math.max(0, d));
    [colluders, dropouts].forEach((value, at) => {
      counts[at].value = value;
      counts[at].nextElementSibling.textContent = `${value} of ${most}`;
      counts[at].setAttribute("aria-valuetext", `${value} of ${most} other sites`);
    });
    show();
  }

  if (explore) {
    explore.clients.forEach((client, place) => {
      if (client.noises) who.append(make("option", { value: place }, `${client.name} (ε ${shown(client.epsilon)})`));
    });
    who.addEventListener("change", () => choose(planned()));
    slider.addEventListener("input", () => choose(toEpsilon(Number(slider.value))));
    entry.addEventListener("change", () => { if (Number(entry.value) > 0) choose(Number(entry.value)); else choose(epsilon); });
    document.getElementById("reset").addEventListener("click", () => {
      if (sharing) trust(sharing.colluders, sharing.dropouts);
      choose(planned());
    });
    if (sharing) for (const one of counts) one.addEventListener("input", () => trust(Number(counts[0].value), Number(counts[1].value)));
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
    if (sharing) trust(colluders, dropouts);
  }
  start();
