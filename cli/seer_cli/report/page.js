"use strict";
// Draws the runs of the element "data".  Ids and reasons are other people's text: they only ever become text
// nodes and labels on a canvas, never markup.
(() => {
  const PAGE = JSON.parse(document.getElementById("data").textContent);
  let RUNS = PAGE.runs;
  const SECONDS = {
    decode: "decode", prefill: "prefill (estimated)", drafts: "drafts", load: "KV from the pool (estimated)",
    between: "work, but no step", idle: "idle", down: "down",
  };
  const CAUSES = {
    slots: "for a slot", kv: "for KV", turn: "for their turn", paused: "while paused", instances: "for an instance",
  };
  const FIGURES = [
    ["requests", "responses", 0], ["groups", "groups", 0], ["tokens", "tokens", 0],
    ["total_time_s", "total time, s", 1], ["tail_time_s", "tail time, s", 1],
    ["throughput_tokens_per_s", "tokens per second", 0], ["max_tokens", "longest response, tokens", 0],
    ["chunks", "chunks", 0], ["migrations", "migrations", 0], ["preemptions", "preemptions", 0],
    ["recomputed_tokens", "recomputed tokens", 0], ["prefilled_tokens", "prefilled tokens", 0],
    ["pool_tokens", "tokens from the KV pool", 0], ["acceptance_length", "tokens per request and step", 2],
    ["instances_lost", "instances lost", 0],
  ];
  // Distinct also to colour-blind readers, on light and on dark ground; red is kept for what is marked.
  const COLOURS = ["#2f6fd6", "#e08a00", "#14946b", "#c06bb0", "#4aa8dc", "#8a6239", "#6f7b8a", "#a3a31c"];
  const charts = [];
  const main = document.getElementById("main");
  let run = RUNS[0];

  const number = (value, digits = 0) =>
    value === null || value === undefined
      ? "" : value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const percent = (share) => `${number(100 * share, share < 0.1 ? 1 : 0)}%`;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function section(id, title, ...children) {
    const made = element("section", {id, "aria-labelledby": `${id}-title`},
      element("h2", {id: `${id}-title`, tabindex: "-1"}, title), ...children);
    main.append(made);
    return made;
  }

  /** A table of rows; the first `texts` columns are text. */
  function table(caption, head, rows, texts = 1) {
    const cell = (tag, value, index, more = {}) =>
      element(tag, index < texts ? {class: "text", ...more} : more, typeof value === "object" ? value : String(value));
    return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption.replace(/^./, (first) => first.toUpperCase())},
      element("table", {}, element("caption", {class: "skip"}, caption),
        element("thead", {}, element("tr", {}, ...head.map((each, i) => cell("th", each, i, {scope: "col"})))),
        element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((each, i) => cell("td", each, i)))))));
  }

  const numbers = (caption, ...rest) =>
    element("details", {}, element("summary", {}, `Numbers: ${caption}`), table(caption, ...rest));

  const red = () => dark() ? "#ff7a70" : "#c22a20";
  const dark = () => document.documentElement.dataset.scheme === "dark";

  /** A chart with a description for screen readers; `option` is made anew when colours change. */
  function chart(label, option, height = 320, renderer = "svg") {
    const place = element("div", {class: "chart", role: "img", "aria-label": label});
    place.style.height = `${height}px`;
    charts.push({place, option, renderer, label, drawn: null});
    return place;
  }

  function draw() {
    for (const each of charts) {
      if (each.drawn) each.drawn.dispose();
      each.drawn = echarts.init(each.place, dark() ? "dark" : null, {renderer: each.renderer});
      each.drawn.setOption({
        backgroundColor: "transparent", animation: false, color: COLOURS,
        textStyle: {fontFamily: "system-ui, sans-serif"},
        aria: {enabled: true, label: {description: each.label},
          decal: {show: document.getElementById("patterns").checked}},
        ...each.option(),
      });
      each.place.setAttribute("aria-label", each.label);
    }
  }

  const tooltip = (formatter) => ({renderMode: "richText", confine: true, valueFormatter: (value) => number(value, 1), ...(formatter ? {formatter} : {})});
  /** An axis of seconds with round ticks, also where it begins or ends between them. */
  const time = (from = 0, to = Number(run.total_s.toPrecision(6))) => ({type: "value", name: "s", min: from, max: to,
    axisLabel: {showMinLabel: from === 0, showMaxLabel: false, hideOverlap: true}, axisTick: {showMinLabel: false, showMaxLabel: false}});
  const middles = () => run.edges_s.slice(1).map((edge, i) => (edge + run.edges_s[i]) / 2);
  const mean = (values) => values.reduce((sum, each) => sum + each, 0) / Math.max(1, values.length);

  const rowHeight = () => Math.max(10, Math.min(26, 700 / run.lanes.length));

  // The sections.

  function inShort() {
    const figures = element("dl", {class: "facts"});
    const wholes = run.whole ? {} : {requests: run.all_requests, groups: run.all_groups};
    for (const [key, title, digits] of FIGURES.slice(0, 6)) {
      const of = wholes[key] === undefined ? "" : ` of ${number(wholes[key])}`;
      figures.append(element("div", {}, element("dt", {}, of ? `${title} done` : title),
        element("dd", {"data-figure": key}, number(run.figures[key], digits) + of)));
    }
    const done = run.whole ? `${number(run.figures.requests)} responses of ${number(run.all_groups)} groups on ${run.all_lanes} instances`
      : `${number(run.figures.requests)} of ${number(run.all_requests)} responses and ${number(run.figures.groups)} of ${number(run.all_groups)} groups`
        + ` were done on ${run.all_lanes} instances when the trace ended`;
    const sentences = [element("p", {}, done
      + `. The last tenth took ${number(run.tail_s, 1)} s of ${number(run.total_s, 1)} s`
      + ` (${percent(run.tail_s / Math.max(run.total_s, 1e-9))}).`)];
    sentences.push(element("p", {},
      `An instance had work for ${number(run.busy_s, 1)} s on average, with ${number(run.running[0], 1)} chunks at a time before the tail`
      + ` and ${number(run.running[1], 1)} in it. The chunks of ${run.longest_request} alone ran for ${number(run.longest_ran_s, 1)} s.`));
    if (run.bound_s !== null) sentences.push(element("p", {},
      `By the simulator's cost model no schedule ${run.drafts_by_siblings.length ? "with" : "without"} drafts takes less than ${number(run.bound_s, 1)} s:`
      + ` the run took ${number(run.total_s / run.bound_s, 2)} times its bound.`));
    if (run.figures.engine) sentences.push(element("p", {},
      `Engine ${run.figures.engine}, KV pool ${run.figures.kv_pool ? run.figures.kv_pool.name : "none"}, seed ${run.figures.seed}, plug-ins `
      + `${(run.figures.plugins || []).map((each) => each.name).join(", ") || "none"}.`));
    const found = element("ol", {class: "findings"});
    for (const each of run.findings.slice(0, 3)) found.append(finding(each));
    const made = section("short", "In short", figures, ...sentences,
      element("h3", {}, "What cost most"),
      element("p", {}, "Each share is the most that the run could have gained without the cause; they overlap, and do not add up."),
      run.findings.length ? found : element("p", {}, "Nothing cost as much as half a percent of the time."));
    if (run.findings.length > 3) {
      const rest = element("ol", {class: "findings", start: "4", style: "counter-reset: finding 3"});
      for (const each of run.findings.slice(3)) rest.append(finding(each));
      made.append(element("details", {}, element("summary", {}, `${run.findings.length - 3} more`), rest));
    }
    made.append(numbers("all figures of the run", ["figure", "value"],
      FIGURES.filter(([key]) => run.figures[key] !== undefined)
        .map(([key, title, digits]) => [title, number(run.figures[key], digits)])));
  }

  function finding(each) {
    const made = element("li", {}, element("strong", {}, each.title), ` (at most ${percent(each.share)} of the time). `, each.text);
    if (each.request && run.lives.some((life) => life.request === each.request)) {
      const link = element("a", {href: "#request"}, " Its life");
      link.addEventListener("click", () => showLife(each.request));
      made.append(link);
    }
    return made;
  }

  function sideBySide() {
    const first = RUNS[0];
    const rows = FIGURES.filter(([key]) => RUNS.some((each) => each.figures[key] !== undefined)).map(
      ([key, title, digits]) => [title, ...RUNS.map((each) => {
        const value = each.figures[key], base = first.figures[key];
        const zero = number(0, digits), shown = number(value, digits);
        const compared = each !== first && base && value !== undefined && number(base, digits) !== zero;
        return shown + (compared ? ` (${number(value / base, 2)}x)` : "");
      })]);
    rows.push(["longest response's own chunks, s", ...RUNS.map((each) => number(each.longest_ran_s, 1))]);
    rows.push(["chunks at a time, before the tail", ...RUNS.map((each) => number(each.running[0], 1))]);
    rows.push(["chunks at a time, in the tail", ...RUNS.map((each) => number(each.running[1], 1))]);
    if (RUNS.some((each) => each.bound_s !== null)) {
      rows.push(["least time of any schedule, s", ...RUNS.map((each) => number(each.bound_s, 1))]);
      rows.push(["over that", ...RUNS.map((each) => each.bound_s ? `${number(each.total_s / each.bound_s, 2)}x` : "")]);
    }
    for (const [kind, title] of Object.entries(SECONDS)) rows.push([`instances: ${title}`, ...RUNS.map(
      (each) => percent(mean(each.lanes.map((lane) => lane.seconds[kind] / Math.max(each.total_s, 1e-9)))))]);
    const ends = RUNS.map((each) => new Map(each.groups.map((group) => [group.id, group])));
    const shared = first.groups.filter((group) => ends.every((each) => each.has(group.id)));
    const moved = shared.map((group) => [group.id, ...ends.map((each) => each.get(group.id).last_s)])
      .sort((a, b) => spread(b) - spread(a)).slice(0, 20);
    section("side", "Side by side",
      element("p", {}, `The ratio in brackets is to ${first.name}.`),
      table("the runs side by side", ["", ...RUNS.map((each) => each.name)], rows),
      element("h3", {}, "Responses finished over time"),
      chart(`Responses finished over time in ${RUNS.length} runs: ${RUNS.map((each) => `${each.name} after ${number(each.total_s, 1)} s`).join(", ")}.`, () => ({
        legend: {type: "scroll", top: 0}, tooltip: tooltip(), grid: {left: 60, right: 30, bottom: 40},
        xAxis: {type: "value", name: "s", min: 0}, yAxis: {type: "value", name: "responses"},
        series: RUNS.map((each) => ({type: "line", name: each.name, showSymbol: false, step: "end", data: each.finishes})),
      })),
      element("h3", {}, "Groups whose end moved most"),
      moved.length
        ? table("when groups ended", ["group", ...RUNS.map((each) => `${each.name}, s`)],
          moved.map(([id, ...times]) => [id, ...times.map((each) => number(each, 1))]))
        : element("p", {}, "The runs have no groups in common."));
  }
  const spread = ([, ...times]) => Math.max(...times) - Math.min(...times);

  function instances() {
    const figures = {
      running: ["chunks there, running or queued", (lane) => lane.running, 1], reserved: ["KV reserved, %", (lane) => lane.reserved.map((each) => 100 * each), 0],
      kv_used: ["KV in use, %", (lane) => lane.kv_used.map((each) => 100 * each), 0],
      queued: ["requests in the engine's own queue", (lane) => lane.queued, 1],
      idle: ["idle, %", (lane) => lane.idle.map((each) => 100 * each), 0],
    };
    const choice = element("select", {id: "lane-figure"}, ...Object.entries(figures).map(([key, [title]]) => element("option", {value: key}, title)));
    const names = run.lanes.map((lane) => lane.name);
    const height = 110 + rowHeight() * names.length;
    const slow = run.lanes.filter((lane) => lane.pace).sort((a, b) => (b.slowness || 0) - (a.slowness || 0)).slice(0, 3);
    const place = chart(`Instances as lanes over time, coloured by load. ${names.length} instances over ${number(run.total_s, 1)} s.`, () => {
      const [title, read, digits] = figures[choice.value];
      const cells = run.lanes.flatMap((lane, y) => read(lane).map((value, x) => [x, y, Number(value.toFixed(2))]));
      const most = Math.max(1e-9, ...cells.map((cell) => cell[2]));
      return {
        tooltip: tooltip(({value}) => `${names[value[1]]}, ${number(run.edges_s[value[0]], 1)} s\n${title}: ${number(value[2], digits)}`),
        grid: {left: 130, right: 30, top: 10, bottom: 90},
        xAxis: [{type: "category", data: middles(), show: false}, {...time(), position: "bottom"}],
        yAxis: {type: "category", data: names, inverse: true, axisLabel: {width: 110, overflow: "truncate"}},
        visualMap: {min: 0, max: most, orient: "horizontal", left: "center", bottom: 0, calculable: false, precision: digits,
          text: [`${title}, at most ${number(most, digits)}`, "0"], inRange: {color: dark() ? ["#1b2838", "#3d7cc9", "#e3efff"] : ["#eef3f9", "#5b93d3", "#0b2f6b"]}},
        series: [{type: "heatmap", data: cells, progressive: 4000}],
      };
    }, height, "canvas");
    choice.addEventListener("change", draw);
    const changes = [["", run.changes], ...run.lanes.map((lane) => [lane.name, lane.changes])]
      .flatMap(([name, all]) => all.map((each) => [name, each.what, each.at_s]))
      .filter(([, what, at]) => !(what === "started" && at === 0) && what !== "ended").sort((a, b) => a[2] - b[2]);
    const made = section("instances", "Instances over time",
      run.all_lanes > names.length ? element("p", {}, `The ${names.length} slowest of ${run.all_lanes} instances.`) : "",
      element("label", {}, "Colour shows ", choice), place,
      numbers("instances", ["instance", "node", "chunks", "tokens", "slots", "KV, tokens", "step time over the others' at equal load", "mean running", "mean KV reserved", "idle", "down, s"],
        run.lanes.map((lane) => [lane.name, lane.node, number(lane.chunks), number(lane.tokens), number(lane.max_running), number(lane.kv_capacity_tokens),
          lane.slowness === null ? "" : `${number(lane.slowness, 2)}x`, number(mean(lane.running), 1), percent(mean(lane.reserved)),
          percent(mean(lane.idle)), number(lane.seconds.down, 1)]), 2));
    for (const lane of slow) made.append(element("p", {}, lane.pace));
    if (changes.length) made.append(element("h3", {}, "What happened to instances and to the run"),
      table("what happened to instances and to the run", ["instance", "what", "at, s"], changes.slice(0, 200).map(([name, what, at]) => [name, what, number(at, 1)]), 2));
    bars();
  }

  let zoom = [0, 1], marked = "";

  function bars() {
    const columns = run.chunks, count = columns.begin.length;
    if (!count) return;
    const slots = run.lanes.map((_, lane) => Math.max(1, ...columns.slot.filter((slot, i) => columns.instance[i] === lane)));
    const place = chart(`Chunks as bars on their instances; a move is a line. ${number(count)} chunks.`, () => {
      const [from, to] = zoom.map((share) => share * run.total_s);
      const data = [];
      for (let i = 0; i < count; i++) {
        if (columns.begin[i] + columns.length[i] < from || columns.begin[i] > to) continue;
        data.push([columns.begin[i], columns.begin[i] + columns.length[i],
          columns.instance[i] + (columns.slot[i] - 0.5) / (slots[columns.instance[i]] + 1), columns.request[i], i]);
      }
      const mine = data.filter((each) => run.chunk_requests[each[3]] === marked).sort((a, b) => a[0] - b[0]);
      return {
        tooltip: tooltip(({value}) => value[4] === undefined ? "" : describeChunk(value[4])),
        grid: {left: 130, right: 30, top: 10, bottom: 40},
        xAxis: time(from, to),
        yAxis: {type: "value", min: 0, max: run.lanes.length, inverse: true, interval: 1, splitLine: {show: true},
          axisLabel: {formatter: (value) => value < run.lanes.length ? run.lanes[value].name : "", verticalAlign: "top", padding: [6, 0, 0, 0], width: 110, overflow: "truncate"}},
        series: [
          {type: "custom", clip: true, encode: {x: [0, 1], y: 2}, data, progressive: 2000,
            renderItem: (parameters, api) => {
              const lane = run.chunks.instance[api.value(4)];
              const [x, y] = api.coord([api.value(0), api.value(2)]);
              const [end] = api.coord([api.value(1), api.value(2)]);
              const height = Math.max(1, Math.min(14, api.size([0, 1])[1] / (slots[lane] + 1) - 1));
              const own = run.chunk_requests[api.value(3)] === marked;
              return {type: "rect", shape: {x, y, width: Math.max(1, end - x), height},
                style: {fill: own ? red() : COLOURS[groupOf(api.value(3)) % 5], opacity: marked && !own ? 0.45 : 1}};
            }},
          {type: "line", data: mine.flatMap((each) => [[each[0], each[2]], [each[1], each[2]], ["-", "-"]]), showSymbol: false,
            lineStyle: {color: red(), width: 3}, silent: true},
          {type: "line", data: mine.flatMap((each) => [[each[0], each[2]], [each[1], each[2]]]), showSymbol: false,
            lineStyle: {color: red(), width: 1, type: "dotted"}, silent: true},
        ],
      };
    }, Math.min(900, 90 + 60 * run.lanes.length), "canvas");
    const button = (text, change) => {
      const made = element("button", {type: "button"}, text);
      made.addEventListener("click", () => {
        const [from, to] = zoom, width = to - from;
        const wide = Math.min(1, change.width ? width * change.width : width);
        const middle = (from + to) / 2 + (change.move || 0) * width;
        const begin = change.reset ? 0 : Math.max(0, Math.min(1 - wide, middle - wide / 2));
        zoom = change.reset ? [0, 1] : [begin, begin + wide];
        shown.textContent = `${number(zoom[0] * run.total_s, 1)} to ${number(zoom[1] * run.total_s, 1)} s`;
        draw();
      });
      return made;
    };
    const shown = element("span", {role: "status"}, `0.0 to ${number(run.total_s, 1)} s`);
    const all = run.all_chunks > count
      ? `The ${number(count)} chunks of the ${number(run.chunk_requests.length)} requests that finished last, of ${number(run.all_chunks)} in all; colours tell groups apart.`
      : `All ${number(count)} chunks; colours tell groups apart.`;
    const legend = " Red is the request that is chosen under “One request”; its dotted lines are waits and moves.";
    document.getElementById("instances").append(element("h3", {}, "Chunks"), element("p", {}, all + legend),
      element("div", {class: "bar zoom"}, button("zoom in", {width: 0.5}), button("zoom out", {width: 2}), button("earlier", {move: -0.5}),
        button("later", {move: 0.5}), button("show all", {reset: true}), shown), place,
      numbers("chunks", ["request", "instance", "result", "from, s", "to, s", "tokens", "drafts accepted"],
        Array.from({length: Math.min(count, 500)}, (_, k) => count - 1 - k).map((i) => [run.chunk_requests[columns.request[i]],
          run.lanes[columns.instance[i]].name, run.chunk_ends[columns.end[i]], number(columns.begin[i], 2), number(columns.begin[i] + columns.length[i], 2),
          number(columns.tokens[i]), number(columns.accepted[i])]), 3));
  }

  const groups = new Map();
  function groupOf(request) {
    const name = run.chunk_requests[request], id = name.slice(0, name.lastIndexOf("/"));
    if (!groups.has(id)) groups.set(id, groups.size);
    return groups.get(id);
  }

  function describeChunk(i) {
    const columns = run.chunks;
    return `${run.chunk_requests[columns.request[i]]} on ${run.lanes[columns.instance[i]].name}\n`
      + `${number(columns.begin[i], 2)} to ${number(columns.begin[i] + columns.length[i], 2)} s, ${number(columns.tokens[i])} tokens`
      + `${columns.accepted[i] ? `, ${number(columns.accepted[i])} by drafts` : ""}${columns.moved[i] ? ", moved there" : ""}\n${run.chunk_ends[columns.end[i]]}`;
  }

  function seconds() {
    const kinds = Object.keys(SECONDS).filter((kind) => run.lanes.some((lane) => lane.seconds[kind] > 0));
    const names = run.lanes.map((lane) => lane.name);
    const sums = Object.fromEntries(kinds.map((kind) => [kind, mean(run.lanes.map((lane) => lane.seconds[kind]))]));
    section("seconds", "Where the time of instances went",
      element("p", {}, `On average, of ${number(run.total_s, 1)} s: ` + kinds.map((kind) => `${SECONDS[kind]} ${number(sums[kind], 1)} s (${percent(sums[kind] / Math.max(run.total_s, 1e-9))})`).join(", ") + "."),
      chart(`Seconds of each instance by kind: ${kinds.map((kind) => `${SECONDS[kind]} ${number(sums[kind], 1)} s`).join(", ")} on average.`, () => ({
        legend: {type: "scroll", top: 0}, tooltip: {...tooltip(), trigger: "axis", axisPointer: {type: "shadow"}}, grid: {left: 130, right: 30, bottom: 40},
        xAxis: time(), yAxis: {type: "category", data: names, inverse: true, axisLabel: {width: 110, overflow: "truncate"}},
        series: kinds.map((kind) => ({type: "bar", stack: "seconds", name: SECONDS[kind], data: run.lanes.map((lane) => Number(lane.seconds[kind].toFixed(3)))})),
      }), 120 + rowHeight() * names.length),
      numbers("seconds of instances", ["instance", ...kinds.map((kind) => SECONDS[kind]), "in all"],
        run.lanes.map((lane) => [lane.name, ...kinds.map((kind) => number(lane.seconds[kind], 2)),
          number(kinds.reduce((sum, kind) => sum + lane.seconds[kind], 0), 2)])));
  }

  function finishes() {
    const count = run.finishes.length ? run.finishes[run.finishes.length - 1][1] : 0;
    section("finishes", "Responses over time",
      element("p", {}, `Nine tenths of the responses were done at ${number(run.tail_begins_s, 1)} s, all at ${number(run.total_s, 1)} s.`),
      chart(`Responses finished over time: nine tenths at ${number(run.tail_begins_s, 1)} s, all ${number(count)} at ${number(run.total_s, 1)} s.`, () => ({
        legend: {type: "scroll", top: 0}, tooltip: {...tooltip(), trigger: "axis"}, grid: {left: 70, right: 70, bottom: 40}, xAxis: time(),
        yAxis: [{type: "value", name: "finished"}, {type: "value", name: "waiting", splitLine: {show: false}}],
        series: [
          {type: "line", name: "finished", showSymbol: false, data: run.finishes,
            markArea: {silent: true, itemStyle: {opacity: 0.15, color: "#d1342f"}, label: {position: "insideTopLeft", color: dark() ? "#e6ebf2" : "#1b2430"}, data: [[{xAxis: run.tail_begins_s, name: "tail"}, {xAxis: run.total_s}]]}},
          {type: "line", name: "waiting", yAxisIndex: 1, showSymbol: false, data: middles().map((at, i) => [at, run.waiting[i]]), lineStyle: {type: "dashed"}},
        ],
      })),
      chart(`Tokens per second over time; ${number(run.figures.throughput_tokens_per_s)} on average.`, () => ({
        tooltip: {...tooltip(), trigger: "axis"}, grid: {left: 70, right: 70, bottom: 40}, xAxis: time(), yAxis: {type: "value", name: "tokens per second"},
        series: [{type: "line", name: "tokens per second", areaStyle: {opacity: 0.3}, showSymbol: false, data: middles().map((at, i) => [at, run.tokens_per_s[i]])}],
      }), 240),
      numbers("over time", ["at, s", "waiting", "tokens per second"], middles().map((at, i) => [number(at, 1), number(run.waiting[i], 1), number(run.tokens_per_s[i])]), 0));
  }

  function waits() {
    const kinds = Object.keys(CAUSES).filter((kind) => run.waited_s[kind] > 0);
    const all = kinds.reduce((sum, kind) => sum + run.waited_s[kind], 0);
    const queued = run.lanes.reduce((sum, lane) => sum + mean(lane.queued) * run.total_s, 0);
    section("waits", "For what requests waited",
      element("p", {}, kinds.length ? `All requests together waited ${number(all, 1)} s. A wait is for a slot while every instance runs as many`
        + " requests as it may, for KV while no instance with a free slot has room for the next chunk, and for its turn while one has: others were preferred."
        : "No request waited for an instance.",
        queued > 0.05 * run.total_s ? ` In the engines' own queues they waited ${number(queued, 1)} s more.` : ""),
      kinds.length ? chart(`Seconds that requests waited: ${kinds.map((kind) => `${CAUSES[kind]} ${number(run.waited_s[kind], 1)}`).join(", ")}.`, () => ({
        tooltip: tooltip(), grid: {left: 130, right: 60, top: 10, bottom: 40}, xAxis: {type: "value", name: "s", axisLabel: {hideOverlap: true}},
        yAxis: {type: "category", data: kinds.map((kind) => CAUSES[kind]), inverse: true},
        series: [{type: "bar", data: kinds.map((kind) => run.waited_s[kind]), label: {show: true, position: "right", formatter: ({value}) => percent(value / all)}}],
      }), 90 + 34 * kinds.length) : "",
      numbers("waits", ["requests waited", "s, of all requests"], kinds.map((kind) => [CAUSES[kind], number(run.waited_s[kind], 1)])));
  }

  function lengths() {
    const done = run.groups.filter((group) => group.finished);
    const worst = done.reduce((found, group) => group.longest_tokens - group.first_tokens > found.longest_tokens - found.first_tokens ? group : found, done[0]);
    const late = done.slice(0, 40);
    section("groups", "Groups and their lengths",
      element("p", {}, "A group's first finished response is the probe from which the scheduler learns how long the others will be."
        + (worst ? ` The most tokens came after it in group ${worst.id}: first ${number(worst.first_tokens)}, longest ${number(worst.longest_tokens)}.` : "")
        + " In the picture red dots are groups that ended late; on the dashed line the longest response is no longer than the first."
        + (run.all_groups > run.groups.length ? ` Shown are the ${number(run.groups.length)} groups that ended last, of ${number(run.all_groups)}.` : "")),
      chart(`The longest response of each group against its first. ${worst ? `In ${worst.id} the first had ${worst.first_tokens} tokens and the longest ${worst.longest_tokens}.` : ""}`, () => ({
        tooltip: tooltip(({value}) => value[2] ? `${value[2]}\nfirst ${number(value[0])}, longest ${number(value[1])} tokens\nended at ${number(value[3], 1)} s` : ""),
        grid: {left: 70, right: 40, bottom: 50}, xAxis: {type: "value", name: "first response, tokens", nameLocation: "middle", nameGap: 28},
        yAxis: {type: "value", name: "longest, tokens"},
        visualMap: {show: false, dimension: 3, min: 0, max: run.total_s, inRange: {color: dark() ? ["#5b7ea8", "#ff9d66"] : ["#9db8d9", "#b5341c"]}},
        series: [{type: "scatter", symbolSize: 9, data: done.map((group) => [group.first_tokens, group.longest_tokens, group.id, group.last_s]),
          markLine: {silent: true, symbol: "none", animation: false, label: {show: false}, data: [[{coord: [0, 0]}, {coord: [Math.max(1, ...done.map((group) => group.first_tokens)), Math.max(1, ...done.map((group) => group.first_tokens))]}]]}}],
      })),
      element("h3", {}, late.length < done.length ? `The ${late.length} groups that ended last` : "All groups, the last one first"),
      chart(`First, median and longest response of the ${late.length} groups that ended last.`, () => ({
        legend: {type: "scroll", top: 0}, tooltip: {...tooltip(), trigger: "axis"}, grid: {left: 70, right: 30, bottom: 70},
        xAxis: {type: "category", data: late.map((group) => group.id), axisLabel: {rotate: 60, width: 90, overflow: "truncate"}}, yAxis: {type: "value", name: "tokens"},
        series: [["first", "first_tokens", "circle"], ["median", "median_tokens", "diamond"], ["longest", "longest_tokens", "triangle"]].map(
          ([name, key, symbol]) => ({type: "scatter", name, symbol, symbolSize: 9, data: late.map((group) => group[key])})),
      }), 360),
      numbers("groups", ["group", "responses", "prompt", "first", "median", "longest", "submitted, s", "first done, s", "all done, s", "estimates: longest so far"],
        run.groups.map((group) => [group.id, `${group.finished} of ${group.n}`, number(group.prompt_tokens), number(group.first_tokens), number(group.median_tokens),
          number(group.longest_tokens), number(group.submitted_s, 1), number(group.first_s, 1), number(group.last_s, 1),
          group.estimates.map(([at, tokens]) => `${number(tokens)} from ${number(at, 1)} s`).join(", ")])));
  }

  function drafts() {
    if (!run.drafts_by_siblings.length) return;
    const line = (label, rows, name) => [
      chart(label, () => ({
        tooltip: {...tooltip(), trigger: "axis"}, grid: {left: 70, right: 40, bottom: 50}, xAxis: {type: "category", data: rows.map((row) => number(row.key)), name, nameLocation: "middle", nameGap: 28},
        yAxis: {type: "value", name: "tokens per step", min: 1},
        series: [{type: "line", name: "tokens per request and step", data: rows.map((row) => row.tokens_per_step)}],
      }), 260),
      numbers(name, [name, "steps", "tokens per step", "accepted of drafted"], rows.map((row) => [number(row.key), number(row.steps), number(row.tokens_per_step, 2), row.accepted_share === null ? "" : percent(row.accepted_share)]), 0),
    ];
    const positions = run.drafts_by_position.map((share, i) => [i + 1, share]);
    const figures = run.figures, costs = figures.drafting_share;
    section("drafts", "Drafts",
      element("p", {}, figures.acceptance_length ? `A request got ${number(figures.acceptance_length, 2)} tokens in a step, where it gets one without drafts`
        + (costs ? `; drafts took ${percent(costs)} of the time of steps.` : ".") : ""),
      element("h3", {}, "By siblings that had finished"), ...line("Tokens per request and step, by the siblings that had finished when the chunk was sent.", run.drafts_by_siblings, "siblings finished"),
      element("h3", {}, "By age of the response"), ...line("Tokens per request and step, by the tokens that the response had.", run.drafts_by_age, "tokens when the chunk began, at least"),
      ...(positions.length ? [element("h3", {}, "By position in the draft"),
        chart("Share of drafts accepted so far, by position.", () => ({
          tooltip: {...tooltip(), trigger: "axis"}, grid: {left: 70, right: 40, bottom: 50}, xAxis: {type: "category", data: positions.map(([at]) => at), name: "position", nameLocation: "middle", nameGap: 28},
          yAxis: {type: "value", name: "accepted so far", min: 0, max: 1}, series: [{type: "bar", name: "accepted so far", data: positions.map(([, share]) => Number(share.toFixed(4)))}],
        }), 260), numbers("positions", ["position", "accepted so far"], positions.map(([at, share]) => [at, percent(share)]), 0)] : []));
  }

  let lifePlace, lifeChoice;
  function life() {
    if (!run.lives.length) return;
    lifeChoice = element("select", {id: "life"}, ...run.lives.map((each) => element("option", {value: each.request}, each.request)));
    lifePlace = element("div", {"aria-live": "polite"});
    lifeChoice.addEventListener("change", () => showLife(lifeChoice.value));
    section("request", "One request",
      element("p", {}, `The ${run.lives.length} that finished last, the last one first. `, element("code", {}, "seer explain DIR REQUEST"), " prints any. In brackets is the placer's reason for the instance; a chunk is whole if it wrote all the tokens that it might."),
      element("label", {}, "Request ", lifeChoice), lifePlace);
    showLife(run.lives[0].request, false);
  }

  function showLife(request, redraw = true) {
    const each = run.lives.find((one) => one.request === request);
    if (!each) return;
    marked = request;
    lifeChoice.value = request;
    lifePlace.replaceChildren(element("p", {}, each.beginning), element("p", {}, `${each.end}.`),
      table("waits and chunks of the request", ["at", "for", "where", "what", "group's longest so far", "KV of the context", "drafts"], each.rows, 7));
    if (redraw) draw();
  }

  let asker = "", most = 1;
  function controls() {
    if (!PAGE.controls) return;
    const said = element("span", {role: "status", id: "said"});
    const send = async (command) => {
      try {
        const body = JSON.stringify({...command, by: asker});
        const answer = await fetch("command", {method: "POST", headers: {"X-Seer-Token": token}, body});
        said.textContent = await answer.text();
      } catch {
        said.textContent = "the run does not answer";
      }
    };
    const button = (text, command) => {
      const made = element("button", {type: "button"}, text);
      made.addEventListener("click", () => send(command()));
      return made;
    };
    const lanes = element("select", {id: "drain"}, ...run.lanes.map((lane) => element("option", {value: lane.name}, lane.name)));
    const open = run.groups.filter((group) => group.finished < group.n);
    const late = element("select", {id: "give-up"}, ...open.map((group) => element("option", {value: group.id}, group.id)));
    const limited = element("input", {type: "number", id: "limit", min: "1", value: most, size: "6"});
    limited.addEventListener("input", () => { most = Number(limited.value); });
    const name = element("input", {type: "text", id: "asker", maxlength: "100", value: asker, autocomplete: "name"});
    name.addEventListener("input", () => { asker = name.value; });
    section("control", "Control",
      element("div", {class: "bar"}, element("label", {}, "Your name, for the trace ", name)),
      element("div", {class: "bar"}, button("pause", () => ({do: "pause"})), button("go on", () => ({do: "resume"}))),
      element("div", {class: "bar"}, element("label", {}, "Instance ", lanes), button("drain it", () => ({do: "drain", what: lanes.value})),
        element("label", {}, "Chunks at once ", limited), button("limit it", () => ({do: "limit", what: lanes.value, max_running: Number(limited.value)}))),
      open.length ? element("div", {class: "bar"}, element("label", {}, "Group ", late), button("give it up", () => ({do: "give_up", what: late.value}))) : "",
      element("p", {}, said));
  }

  function show() {
    for (const each of charts) if (each.drawn) each.drawn.dispose();
    charts.length = 0;
    groups.clear();
    main.replaceChildren();
    if (RUNS.length > 1) sideBySide();
    if (RUNS.length > 1) main.append(element("p", {}, `What follows is of the run chosen above: ${run.name}.`));
    for (const part of [inShort, controls, instances, life, seconds, finishes, waits, lengths, drafts]) part();
    document.getElementById("sections").replaceChildren(...[...main.querySelectorAll("section")].map((each) =>
      element("li", {}, element("a", {href: `#${each.id}`}, each.querySelector("h2").textContent))));
    draw();
  }

  function choose() {
    const choice = document.getElementById("run"), name = run && run.name;
    document.getElementById("run-choice").hidden = RUNS.length < 2;
    choice.replaceChildren(...RUNS.map((each, i) => element("option", {value: i}, each.name)));
    run = RUNS.find((each) => each.name === name) || RUNS[RUNS.length - 1];
    choice.value = RUNS.indexOf(run);
  }

  // While a run goes on its figures come from the server, and the page keeps what the reader has chosen.

  const token = new URLSearchParams(location.search).get("token");
  const follow = document.getElementById("follow"), news = document.getElementById("news");

  function showAnew(runs) {
    const kept = Object.fromEntries([...document.querySelectorAll("main select")].map((each) => [each.id, each.value]));
    const opened = new Set([...main.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    const said = document.getElementById("said"), place = scrollY;
    const nameOf = (each) => each.tagName + (each.id || each.textContent);
    const focused = main.contains(document.activeElement) ? nameOf(document.activeElement) : "";
    RUNS = runs;
    choose();
    const wanted = marked;
    show();
    for (const [id, value] of Object.entries(kept)) {
      const each = document.getElementById(id);
      if (each && [...each.options].some((option) => option.value === value)) each.value = value;
    }
    if (wanted && run.lives.some((each) => each.request === wanted)) showLife(wanted, false);
    for (const each of main.querySelectorAll("summary")) each.parentElement.open = opened.has(each.textContent);
    if (said && document.getElementById("said")) document.getElementById("said").textContent = said.textContent;
    const again = [...main.querySelectorAll("a, button, select, input, summary")].find((each) => nameOf(each) === focused);
    if (again) again.focus({preventScroll: true});
    draw();
    scrollTo(0, place);
  }

  let last = "";
  async function refresh() {
    try {
      const answer = await fetch("figures", {headers: {"X-Seer-Token": token}});
      const text = await answer.text();
      if (!answer.ok) throw new Error(text);
      const busy = main.contains(document.activeElement) && document.activeElement.matches("select, input");
      if (text !== last && follow.checked && !busy) {
        last = text;
        const {runs} = JSON.parse(text);
        if (runs.length) showAnew(runs);
        news.textContent = runs.length ? "" : "no groups yet";
      }
    } catch {
      news.textContent = "the run has ended, or answers no more";
    }
    setTimeout(refresh, 2000);
  }

  const scheme = document.getElementById("scheme"), system = matchMedia("(prefers-color-scheme: dark)");
  const recolour = () => {
    document.documentElement.dataset.scheme = scheme.value === "auto" ? (system.matches ? "dark" : "light") : scheme.value;
    draw();
  };
  scheme.addEventListener("change", recolour);
  system.addEventListener("change", recolour);
  document.getElementById("patterns").addEventListener("change", draw);
  addEventListener("resize", () => charts.forEach((each) => each.drawn && each.drawn.resize()));
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = each.querySelectorAll("tr").length < 60; }));
  document.getElementById("run").addEventListener("change", (event) => { run = RUNS[event.target.value]; zoom = [0, 1]; show(); });
  document.documentElement.dataset.scheme = system.matches ? "dark" : "light";
  if (PAGE.live) {
    document.getElementById("follow-choice").hidden = false;
    refresh();
  } else {
    run = RUNS[0];
    choose();
    show();
  }
})();
