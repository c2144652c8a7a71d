// The last part of every page. Light and dark: the system's until the button says otherwise.

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

// Charts, once there is a width for them.
for (const one of main.querySelectorAll('*')) if (one.drawn) one.drawn();
document.documentElement.dataset.ready = 'yes';
