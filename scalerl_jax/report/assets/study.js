// The page of a study: for each study its curves, its table, what the comparisons say; the commands that made it.

const STUDY_AXES = {
  device_hours: { title: 'device-hours', form: (value) => `${plain(value)} device-hours`, ticks: plain },
  typical_hours: { title: 'typical device-hours', form: (value) => `${plain(value)} device-hours`, ticks: plain },
  model_flops: { title: 'model FLOPs', form: flops, ticks: short },
  step: { title: 'updates', form: (value) => `update ${Math.round(value)}`, ticks: short },
};
const AXIS = STUDY_AXES[page.x] || { title: page.x, form: (value) => `${short(value)} ${page.x}`, ticks: short };
const MOST_SHOWN = 8; // curves at first: as many as there are colours

const main = document.getElementById('main');
main.replaceChildren(
  make(
    'div',
    { class: 'head' },
    make('h1', { text: RUNS[0].name }),
    make('p', {
      class: 'lead',
      text: `study, ${page.finished} of ${page.planned} runs finished · written ${moment(page.written)}`,
    }),
  ),
);
const sections = page.studies.map(studySection);
main.append(...sections, commandsSection());
document
  .getElementById('nav')
  .append(...page.studies.map((study, at) => make('a', { href: `#${sections[at].id}`, text: words(study.name) })));
document.querySelector('.skip').href = `#${sections[0].id}`;
document.getElementById('foot').append(make('p', { text: 'One file, no network. Charts: uPlot 1.6.32 (MIT).' }));

function words(name) {
  const text = name.replaceAll('_', ' ');
  return text[0].toUpperCase() + text.slice(1);
}

function studySection(study) {
  const body = section(`study-${study.name}`, words(study.name), `Against ${study.baseline}.`);
  if (!study.members.length) {
    body.append(make('p', { class: 'none', text: 'No member is evaluated yet.' }));
    return body;
  }
  const state = { scale: 'linear', points: study.members.length <= 4 };
  const shown = new Set(firstShown(study));
  const host = make('div');
  const redraw = () => drawStudy(host, study, shown, state);
  const boxes = study.members.map((member, at) =>
    checkbox(
      member.name,
      shown.has(at),
      (checked) => {
        if (checked) shown.add(at);
        else shown.delete(at);
        redraw();
      },
      line(at),
    ),
  );
  const controls = make(
    'div',
    { class: 'controls' },
    choice(
      `scale-${study.name}`,
      'Axis',
      [
        ['linear', 'Linear'],
        ['log', 'Log'],
      ],
      state.scale,
      (value) => {
        state.scale = value;
        redraw();
      },
    ),
    make(
      'fieldset',
      { class: 'checks' },
      make('legend', { text: 'Evaluations' }),
      checkbox('as points', state.points, (checked) => {
        state.points = checked;
        redraw();
      }),
    ),
  );
  const legend = make('fieldset', { class: 'checks' }, make('legend', { text: 'Members' }), ...boxes);
  const rows = study.members.map((member, at) => [
    make('span', { class: 'named' }, line(at), make('span', { text: member.name })),
    ...member.cells.slice(1),
  ]);
  body.append(
    make('div', { class: 'card' }, controls, legend, host),
    make(
      'div',
      { class: 'card' },
      table(page.heads, rows, `Members of ${study.name}; intervals are 95 %, C is ${AXIS.title}`),
    ),
  );
  if (study.sentences.length) {
    const said = study.sentences.map((text) => make('p', { text: text[0].toUpperCase() + text.slice(1) }));
    body.append(make('div', { class: 'card' }, make('h3', { text: 'Compared' }), make('div', { class: 'said' }, ...said)));
  }
  body.drawn = redraw;
  return body;
}

// The baseline and, where there are too many, those that end farthest from it.
function firstShown(study) {
  const end = (member) => Number(member.cells.at(-2));
  const base = Math.max(
    0,
    study.members.findIndex((member) => member.name === study.baseline),
  );
  return study.members
    .map((member, at) => at)
    .sort((one, other) => away(other) - away(one))
    .slice(0, MOST_SHOWN);

  function away(at) {
    return at === base ? Infinity : Math.abs(end(study.members[at]) - end(study.members[base]));
  }
}

// A stroke as it is in the chart, dashes too: more members than colours differ in these.
function line(at) {
  const mark = swatch(runColour(at), 'stroke');
  const dash = runDash(at);
  if (dash.length) {
    const stops = [];
    let from = 0;
    dash.forEach((width, part) => {
      stops.push(`${part % 2 ? 'transparent' : 'var(--mark)'} ${from}px ${from + width}px`);
      from += width;
    });
    mark.style.setProperty('background', `repeating-linear-gradient(90deg, ${stops.join(', ')})`);
  }
  return mark;
}

function drawStudy(host, study, shown, state) {
  const series = [];
  const visible = study.members.map((member, at) => [member, at]).filter(([, at]) => shown.has(at));
  for (const [member, at] of visible) {
    const most = Math.max(...member.x.filter(known));
    const drawn = member.curve ? member.curve.x.map((x, i) => i).filter((i) => member.curve.x[i] <= most) : [];
    const pick = (values) => drawn.map((i) => values[i]);
    series.push({
      name: member.name,
      colour: runColour(at),
      dash: runDash(at),
      width: member.name === study.baseline ? 3 : 1.75,
      x: member.curve ? pick(member.curve.x) : member.x,
      y: member.curve ? pick(member.curve.y) : member.y,
      low: member.curve && visible.length <= 4 ? pick(member.curve.low) : undefined,
      high: member.curve && visible.length <= 4 ? pick(member.curve.high) : undefined,
      alpha: 0.1,
    });
  }
  if (state.points)
    for (const [member, at] of visible)
      series.push({
        name: member.name,
        quiet: Boolean(member.curve),
        colour: runColour(at),
        points: true,
        x: member.x,
        y: member.y,
      });
  const all = visible.flatMap(([member]) => member.x).filter((x) => known(x) && (state.scale === 'linear' || x > 0));
  const most = all.length ? Math.max(...all) : 1;
  const least = all.length ? Math.min(...all) : 0.1;
  const values = series.flatMap((one) => one.y).filter(known);
  const low = values.length ? Math.max(0, Math.min(...values) - 0.04) : 0;
  const high = values.length ? Math.min(1.02, Math.max(...values) + 0.04) : 1;
  drawChart(host, {
    label: `Held-out pass rate against ${AXIS.title}: ${visible.map(([member]) => member.name).join(', ')}.`,
    height: 420,
    x: {
      ...AXIS,
      log: state.scale === 'log',
      range: state.scale === 'log' ? [least / 1.3, most * 1.1] : [-0.02 * most, most * 1.02],
    },
    y: { form: decimals, ticks: evenTicks(decimals), range: [low, high] },
    series,
    stops: visible.length ? visible[0][0].x : [0, 1],
    rest: `${AXIS.title}; fitted curves, of members that do not rise the evaluations; drag to zoom, double-click to see all`,
  });
}

function commandsSection() {
  const details = make(
    'details',
    { class: 'card config' },
    make('summary', { text: 'Commands' }),
    make('p', { class: 'what', text: 'The study' }),
    make('pre', { class: 'command', text: page.command }),
    make('p', { class: 'what', text: 'Each of its runs' }),
    make('pre', { class: 'command', text: page.commands.map(([, command]) => command).join('\n') }),
  );
  return make('section', { class: 'commands', 'aria-label': 'Commands' }, details);
}
