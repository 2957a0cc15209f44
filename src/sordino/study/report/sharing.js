// Weights and noise of a sum that is all the server sees: the formulas of server/sharing.py, from plain numbers.
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // argmin ‖w − p‖² with w_i ≤ limit_i, Σ w = 1: w_i = min(p_i + λ, limit_i).
  function nearest(p, limits) {
    const order = p.map((_, at) => at).sort((one, two) => (limits[one] - p[one]) - (limits[two] - p[two]));
    let held = 0;
    let free = sum(p);
    for (let at = 0; at < order.length; at += 1) {
      const level = (1 - held - free) / (order.length - at);
      if (level <= limits[order[at]] - p[order[at]]) return p.map((one, place) => Math.min(one + level, limits[place]));
      held += limits[order[at]];
      free -= p[order[at]];
    }
    return limits.slice();
  }

  // Weights and level v that balance bias against noise: min spread·‖w − p‖² + ratio·v², w_i ≤ a_i v.
  function balance(most, p, spread, ratio) {
    const least = 1 / sum(most);
    const enough = Math.max(...p.map((one, at) => one / most[at]));
    if (spread <= 0 || enough <= least) return [most.map((one) => one * least), least];
    const cost = (level) => spread * sum(nearest(p, most.map((one) => one * level)).map((w, at) => (w - p[at]) ** 2)) + ratio * level ** 2;
    const golden = (Math.sqrt(5) - 1) / 2;
    let [low, high] = [least, enough];
    for (let turn = 0; turn < 60 && high - low > 1e-9 * enough; turn += 1) {
      const [left, right] = [high - golden * (high - low), low + golden * (high - low)];
      if (cost(left) < cost(right)) high = right; else low = left;
    }
    const level = [least, (low + high) / 2, enough].reduce((best, one) => (cost(one) < cost(best) ? one : best));
    const w = nearest(p, most.map((one) => one * level));
    const total = sum(w);
    return [w.map((one) => one / total), level];
  }
