// The page, top to bottom.

const main = document.getElementById('main');
main.replaceChildren();

// ---- 1. The head
const single = RUNS.length === 1 ? RUNS[0] : null;
const warmStart = single && single.kind === 'warm start';
const title = single ? single.name : `${RUNS.length} runs`;
const state = single
  ? single.updates < single.planned
    ? `update ${single.updates} of ${single.planned}`
    : 'finished'
  : RUNS.map((run) => run.name).join(', ');
main.append(
  make(
    'div',
    { class: 'head' },
    make('h1', { text: title }),
    make('p', { class: 'lead', text: `${warmStart ? 'warm start, ' : ''}${state} · written ${moment(page.written)}` }),
  ),
);
if (single) main.append(warmStart ? warmStartFigures(single) : figures(single));

// ---- 2. The sections
const sections = warmStart
  ? [healthSection()]
  : [single ? null : comparison(), scoreSection(), healthSection(), timeSection(), readerSection()].filter(Boolean);
main.append(...sections, configSection());
const NAMES = { compare: 'Compare', score: 'Score', health: 'Health', time: 'Time', rollouts: 'Rollouts' };
document.getElementById('nav').append(...sections.map((one) => make('a', { href: `#${one.id}`, text: NAMES[one.id] })));
document.getElementById('foot').append(make('p', { text: 'One file, no network. Charts: uPlot 1.6.32 (MIT).' }));

function configSection() {
  const details = make(
    'details',
    { class: 'card config' },
    make('summary', { text: 'Config, where it differs from the defaults' }),
  );
  for (const run of RUNS) {
    if (RUNS.length > 1) details.append(make('h3', { text: run.name }));
    details.append(table(['field', 'value'], run.config, `Config of ${run.name}`));
  }
  return details;
}
