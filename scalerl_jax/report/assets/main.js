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

// ---- 3. Light and dark: the system's until the button says otherwise
const dark = matchMedia('(prefers-color-scheme: dark)');
const toggle = document.getElementById('theme');
let chosen = 'auto';
function paint() {
  document.documentElement.dataset.theme = chosen === 'auto' ? (dark.matches ? 'dark' : 'light') : chosen;
  toggle.textContent = { auto: '◐ Auto', light: '○ Light', dark: '● Dark' }[chosen];
  toggle.setAttribute('aria-label', `Colours: ${chosen}`);
  redrawCharts();
}
toggle.addEventListener('click', () => {
  chosen = { auto: 'light', light: 'dark', dark: 'auto' }[chosen];
  paint();
});
dark.addEventListener('change', paint);
paint();

// ---- 4. Charts, once there is a width for them
for (const one of main.querySelectorAll('*')) if (one.drawn) one.drawn();
document.documentElement.dataset.ready = 'yes';
