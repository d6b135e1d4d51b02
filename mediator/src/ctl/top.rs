//! `mediatorctl top`: who uses the cards now, in the terminal.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table, TableState};
use sched::Engine;

use super::client::{self, Client, ClientError};
use super::output::scheduler::{duration, percent, state};
use super::output::{self, NOTHING};
use super::values::span;
use super::{Form, output::scheduler};
use crate::admin::api::{CardScheduler, SchedulerList, VmEngine, VmShare};

/// The window of received shares is the interval, within what the daemon can answer for, in ms.
const WINDOWS_MS: std::ops::RangeInclusive<u64> = 100..=60_000;

#[derive(Clone, Debug, Args)]
pub(super) struct Top {
    /// Name of the card; all if not given
    card: Option<String>,
    /// Time between two looks, and the window in which received shares are taken
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = span)]
    interval: Duration,
    /// Prints the table once and ends, as it also does when the output is no terminal
    #[arg(long)]
    once: bool,
}

/// What is on the screen.
#[derive(Debug, Default)]
struct View {
    cards: Vec<CardScheduler>,
    /// What was before.
    before: BTreeMap<(String, String, Engine), (u64, u64)>,
    /// Why the last look brought nothing.
    error: Option<String>,
    scroll: TableState,
}

const HEADS: [&str; 10] =
    ["CARD", "VM", "ENGINE", "ENTITLED", "RECEIVED", "WAIT", "WAIT 99 %", "QUEUED", "STRIKES", "STATE"];
/// Columns of numbers.
const NUMBERS: [usize; 6] = [3, 4, 5, 6, 7, 8];
/// Widths on the screen.
const WIDTHS: [u16; 10] = [12, 20, 8, 9, 9, 9, 9, 7, 8, 24];

/// One line of the table.
struct Cells {
    cells: [String; 10],
    quarantined: bool,
    struck: bool,
}

impl View {
    fn show(&mut self, cards: Vec<CardScheduler>) {
        let old = std::mem::replace(&mut self.cards, cards);
        self.error = None;
        self.before = each(&old)
            .map(|(card, vm, engine, used)| {
                ((card.card.clone(), vm.vm.clone(), engine), (used.wait.count, used.wait.sum_ns))
            })
            .collect();
    }

    /// Mean wait since the look before, or altogether when there was none.
    fn wait(&self, card: &CardScheduler, vm: &VmShare, engine: Engine, used: &VmEngine) -> String {
        let before = self.before.get(&(card.card.clone(), vm.vm.clone(), engine)).copied().unwrap_or_default();
        let since = used.wait.count.checked_sub(before.0).zip(used.wait.sum_ns.checked_sub(before.1));
        // Less than before: the VM was removed and added again.
        let (count, sum) = since.unwrap_or((used.wait.count, used.wait.sum_ns));
        sum.checked_div(count).map_or_else(|| NOTHING.to_owned(), duration)
    }

    fn rows(&self) -> Vec<Cells> {
        let row = |(card, vm, engine, used): (&CardScheduler, &VmShare, Engine, &VmEngine)| Cells {
            cells: [
                card.card.clone(),
                vm.vm.clone(),
                engine.name().to_owned(),
                percent(vm.entitled_permille),
                percent(used.received_permille),
                self.wait(card, vm, engine, used),
                duration(used.wait.p99_ns),
                vm.queued.to_string(),
                vm.strikes.to_string(),
                state(vm),
            ],
            quarantined: vm.quarantine.is_some(),
            struck: vm.strikes > 0,
        };
        each(&self.cards)
            .filter(|(_, _, engine, used)| used.arrived > 0 || *engine == Engine::Compute)
            .map(row)
            .collect()
    }

    /// One line for each card: its policy, and how busy its engines are.
    fn heads(&self) -> Vec<String> {
        let head = |card: &CardScheduler| {
            let engines =
                card.engines.iter().map(|(engine, used)| format!("{} {}", engine.name(), percent(used.busy_permille)));
            let CardScheduler { card: name, settings, queued, in_flight, .. } = card;
            let busy = engines.collect::<Vec<_>>().join(", ");
            format!("{name}: {}; busy: {busy}; queued {queued}, on the card {in_flight}", settings.policy.name())
        };
        self.cards.iter().map(head).collect()
    }

    /// As text, for what is no terminal.
    fn text(&self) -> String {
        if self.cards.is_empty() {
            return scheduler::cards(&[]);
        }
        let mut rows = vec![output::heads(&HEADS)];
        rows.extend(self.rows().into_iter().map(|row| row.cells.into()));
        format!("{}\n\n{}", self.heads().join("\n"), output::table(rows, &NUMBERS))
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let heads = self.heads();
        let count = u16::try_from(heads.len()).unwrap_or(u16::MAX);
        let [top, middle, bottom] =
            Layout::vertical([Constraint::Length(count), Constraint::Min(2), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(Paragraph::new(heads.into_iter().map(Line::from).collect::<Vec<_>>()), top);
        let rows = self.rows().into_iter().map(|Cells { cells, quarantined, struck }| {
            let style = match () {
                () if quarantined => Style::new().fg(Color::Red),
                () if struck => Style::new().fg(Color::Yellow),
                () => Style::new(),
            };
            Row::new(cells.into_iter().enumerate().map(|(index, cell)| aligned(index, cell))).style(style)
        });
        let head = HEADS.iter().enumerate().map(|(index, name)| aligned(index, (*name).to_owned()));
        let head = Row::new(head).style(Style::new().add_modifier(Modifier::BOLD));
        let table = Table::new(rows, WIDTHS.map(Constraint::Length)).header(head).column_spacing(2);
        frame.render_stateful_widget(table, middle, &mut self.scroll);
        let last = match &self.error {
            Some(error) => Line::styled(error.clone(), Style::new().fg(Color::Red)),
            None => Line::from("q ends, arrows scroll"),
        };
        frame.render_widget(last, bottom);
    }

    fn scroll_by(&mut self, lines: isize) {
        let most = self.rows().len().saturating_sub(1);
        let at = self.scroll.offset().saturating_add_signed(lines).min(most);
        *self.scroll.offset_mut() = at;
    }
}

fn aligned(column: usize, text: String) -> Line<'static> {
    let line = Line::from(text);
    if NUMBERS.contains(&column) { line.right_aligned() } else { line }
}

/// All virtual machines with each engine.
fn each(cards: &[CardScheduler]) -> impl Iterator<Item = (&CardScheduler, &VmShare, Engine, &VmEngine)> {
    let vms = cards.iter().flat_map(|card| card.vms.iter().map(move |vm| (card, vm)));
    vms.flat_map(|(card, vm)| vm.engines.iter().map(move |(engine, used)| (card, vm, *engine, used)))
}

impl Top {
    fn look(&self, client: &Client) -> Result<SchedulerList, ClientError> {
        let interval = u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX);
        let window = interval.clamp(*WINDOWS_MS.start(), *WINDOWS_MS.end());
        match &self.card {
            Some(card) => {
                let path = format!("/v1/cards/{}/scheduler?window_ms={window}", client::segment(card));
                Ok(SchedulerList { schedulers: vec![client.get(&path)?] })
            }
            None => client.get(&format!("/v1/schedulers?window_ms={window}")),
        }
    }

    /// Shows the table until the operator ends it; or once, as text to be printed.
    pub(super) fn run(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        let first = self.look(client)?;
        if self.once || form == Form::Json || !std::io::stdout().is_terminal() {
            return Ok(form.of(&first, |list| {
                let mut view = View::default();
                view.show(list.schedulers.clone());
                view.text()
            }));
        }
        let mut view = View::default();
        view.show(first.schedulers);
        let mut terminal = ratatui::try_init().map_err(ClientError::Terminal)?;
        let ended = loop {
            if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
                break Err(error);
            }
            match self.wait(&mut view) {
                Ok(Turn::Look) => match self.look(client) {
                    Ok(list) => view.show(list.schedulers),
                    // The daemon may come back.
                    Err(error) => view.error = Some(error.to_string()),
                },
                Ok(Turn::Draw) => {}
                Ok(Turn::End) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        ratatui::restore();
        ended.map(|()| String::new()).map_err(ClientError::Terminal)
    }

    /// Waits for a key, or until it is time to look again.
    fn wait(&self, view: &mut View) -> std::io::Result<Turn> {
        let deadline = Instant::now() + self.interval;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if !event::poll(left)? {
                return Ok(Turn::Look);
            }
            let lines = match event::read()? {
                Event::Resize(..) => return Ok(Turn::Draw),
                Event::Key(key) if key.kind != KeyEventKind::Release => match key {
                    KeyEvent { code: KeyCode::Char('q') | KeyCode::Esc, .. } => return Ok(Turn::End),
                    KeyEvent { code: KeyCode::Char('c'), modifiers: KeyModifiers::CONTROL, .. } => {
                        return Ok(Turn::End);
                    }
                    KeyEvent { code: KeyCode::Up, .. } => -1,
                    KeyEvent { code: KeyCode::Down, .. } => 1,
                    KeyEvent { code: KeyCode::PageUp, .. } => -10,
                    KeyEvent { code: KeyCode::PageDown, .. } => 10,
                    _ => continue,
                },
                _ => continue,
            };
            view.scroll_by(lines);
            return Ok(Turn::Draw);
        }
    }
}

/// What is to be done next.
enum Turn {
    Look,
    Draw,
    End,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::api::{Durations, EngineUse, Quarantine, VmTime};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    /// A card whose VM has waited for `sum_ns` in `count` submissions.
    fn card(count: u64, sum_ns: u64, quarantine: Option<Quarantine>) -> CardScheduler {
        let wait = Durations { count, sum_ns, p99_ns: 5_000_000, ..Durations::default() };
        let used = VmEngine { arrived: count, received_permille: 305, wait, ..VmEngine::default() };
        let vm = |name: &str| VmShare {
            vm: name.to_owned(),
            time: VmTime::default(),
            entitled_permille: 500,
            queued: 4,
            in_flight: 1,
            strikes: 2,
            quarantine,
            engines: [(Engine::Compute, used.clone()), (Engine::Copy0, VmEngine::default())].into(),
        };
        let busy = EngineUse { busy_permille: 610, ..EngineUse::default() };
        CardScheduler {
            card: "card0".to_owned(),
            settings: sched::Config::default(),
            window_ms: 1000,
            queued: 8,
            in_flight: 2,
            engines: [(Engine::Compute, busy)].into(),
            vms: vec![vm("web"), vm("build")],
        }
    }

    fn screen(view: &mut View, lines: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(140, lines)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: u16| (0..140).map(|column| buffer[(column, row)].symbol()).collect::<String>();
        (0..lines).map(|row| line(row).trim_end().to_owned()).collect()
    }

    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn waits_are_those_since_the_look_before() {
        let mut view = View::default();
        let shown = |view: &View| view.rows()[0].cells[5].clone();
        view.show(vec![card(10, 10_000_000, None)]);
        assert_eq!(shown(&view), "1 ms");
        view.show(vec![card(14, 30_000_000, None)]);
        assert_eq!(shown(&view), "5 ms");
        view.show(vec![card(14, 30_000_000, None)]);
        assert_eq!(shown(&view), "-", "nothing was started");
        // Another VM of that name.
        view.show(vec![card(2, 6_000_000, None)]);
        assert_eq!(shown(&view), "3 ms");
    }

    #[test]
    fn screen_has_the_card_the_vms_and_what_is_wrong() {
        let mut view = View::default();
        view.show(vec![card(10, 10_000_000, Some(Quarantine { ends_in_ms: Some(1500) }))]);
        let lines = screen(&mut view, 6);
        assert_eq!(lines[0], "card0: band; busy: compute 61.0 %; queued 8, on the card 2");
        assert_eq!(
            cells(&lines[2]),
            ["card0", "web", "compute", "50.0 %", "30.5 %", "1 ms", "5 ms", "4", "2", "QUARANTINED for 1.5 s"]
        );
        assert_eq!(cells(&lines[3])[1], "build", "an engine that is not used has no line");
        assert_eq!((&*lines[4], &*lines[5]), ("", "q ends, arrows scroll"));
        view.scroll_by(1);
        assert_eq!(cells(&screen(&mut view, 6)[2])[1], "build");
        view.scroll_by(9);
        view.scroll_by(-20);
        view.error = Some("no daemon answers".to_owned());
        let lines = screen(&mut view, 6);
        assert_eq!((cells(&lines[2])[1], &*lines[5]), ("web", "no daemon answers"));
    }
}
