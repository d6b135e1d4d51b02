//! The screen: a table of the cards' time, or of their memory.

use admin_client::terminal;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line as Text;
use ratatui::widgets::{Paragraph, Row, TableState};

use super::{Look, memory, time};
use crate::output::{self, scheduler};

/// The columns of a table.
pub(super) struct Table {
    pub(super) heads: &'static [&'static str],
    /// Widths on the screen.
    pub(super) widths: &'static [u16],
    /// Columns that contain numbers.
    pub(super) numbers: &'static [usize],
}

/// Style of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    /// The normal style.
    Good,
    /// The operator should know about it.
    Odd,
    /// The operator should act.
    Bad,
}

/// One line of a table.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) cells: Vec<String>,
    pub(super) tone: Tone,
}

/// The table on the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Time,
    Memory,
}

/// Contents of the screen.
#[derive(Debug, Default)]
pub(super) struct View {
    look: Look,
    /// Waits at the last refresh.
    waits: time::Waits,
    counts: memory::Counts,
    page: Page,
    /// Why the last refresh failed.
    error: Option<String>,
    scroll: TableState,
}

impl View {
    /// Shows the results of a refresh.
    pub(super) fn show(&mut self, look: Look) {
        let before = std::mem::replace(&mut self.look, look);
        self.error = None;
        self.waits = time::waits(&before.schedulers);
        self.counts = memory::counts(&before.memories);
    }

    /// Notes that a refresh has failed.
    pub(super) fn fail(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Switches to the other table.
    pub(super) fn turn_over(&mut self) {
        self.page = match self.page {
            Page::Time => Page::Memory,
            Page::Memory => Page::Time,
        };
        self.scroll = TableState::default();
    }

    fn table(&self, page: Page) -> (Vec<String>, &'static Table, Vec<Line>) {
        let Look { schedulers, memories } = &self.look;
        match page {
            Page::Time => {
                (schedulers.iter().map(time::head).collect(), &time::TABLE, time::lines(schedulers, &self.waits))
            }
            Page::Memory => {
                (memories.iter().map(memory::head).collect(), &memory::TABLE, memory::lines(memories, &self.counts))
            }
        }
    }

    /// Returns both tables as text, for output that is not a terminal.
    pub(super) fn text(&self) -> String {
        if self.look.schedulers.is_empty() {
            return scheduler::cards(&[]);
        }
        let text = [Page::Time, Page::Memory].map(|page| {
            let (heads, table, lines) = self.table(page);
            let mut rows = vec![output::heads(table.heads)];
            rows.extend(lines.into_iter().map(|line| line.cells));
            format!("{}\n\n{}", heads.join("\n"), output::table(rows, table.numbers))
        });
        text.join("\n")
    }

    /// Draws the selected table.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let (heads, table, lines) = self.table(self.page);
        let count = u16::try_from(heads.len()).unwrap_or(u16::MAX);
        let [top, middle, bottom] =
            Layout::vertical([Constraint::Length(count), Constraint::Min(2), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(
            Paragraph::new(heads.iter().map(|head| Text::from(terminal::word(head).into_owned())).collect::<Vec<_>>()),
            top,
        );
        let aligned = |(column, text): (usize, String)| {
            let text = Text::from(terminal::word(&text).into_owned());
            if table.numbers.contains(&column) { text.right_aligned() } else { text }
        };
        let rows = lines.into_iter().map(|Line { cells, tone }| {
            let style = match tone {
                Tone::Bad => Style::new().fg(Color::Red),
                Tone::Odd => Style::new().fg(Color::Yellow),
                Tone::Good => Style::new(),
            };
            Row::new(cells.into_iter().enumerate().map(aligned)).style(style)
        });
        let head = table.heads.iter().map(|name| (*name).to_owned()).enumerate().map(aligned);
        let head = Row::new(head).style(Style::new().add_modifier(Modifier::BOLD));
        let widths = table.widths.iter().copied().map(Constraint::Length);
        let table = ratatui::widgets::Table::new(rows, widths).header(head).column_spacing(2);
        frame.render_stateful_widget(table, middle, &mut self.scroll);
        let last = match (&self.error, self.page) {
            (Some(error), _) => Text::styled(terminal::word(error).into_owned(), Style::new().fg(Color::Red)),
            (None, Page::Time) => Text::from("q ends, m shows memory, arrows scroll"),
            (None, Page::Memory) => Text::from("q ends, m shows time, arrows scroll"),
        };
        frame.render_widget(last, bottom);
    }

    /// Scrolls down, or up when `lines` is less than 0.
    pub(super) fn scroll_by(&mut self, lines: isize) {
        let most = self.table(self.page).2.len().saturating_sub(1);
        let at = self.scroll.offset().saturating_add_signed(lines).min(most);
        *self.scroll.offset_mut() = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::{CardMemory, CardScheduler, Durations, EngineUse, Quarantine, Turn, VmEngine, VmMemory, VmShare, VmTime};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use sched::Engine;

    /// A card whose VM has waited for `sum_ns` in `count` submissions.
    fn card(count: u64, sum_ns: u64, quarantine: Option<Quarantine>) -> CardScheduler {
        let wait = Durations { count, sum_ns, p99_ns: 5_000_000, ..Durations::default() };
        let used = VmEngine { arrived: count, received_permille: 305, wait, ..VmEngine::default() };
        let vm = |name: &str| VmShare {
            vm: name.to_owned(),
            time: VmTime::default(),
            entitled_permille: 500,
            copies_entitled_permille: None,
            queued: 4,
            in_flight: 1,
            strikes: 2,
            overdue: Vec::new(),
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

    fn time(card: CardScheduler) -> Look {
        Look { schedulers: vec![card], memories: Vec::new() }
    }

    /// A card with a VM that has moved `moved` MiB and been denied memory `denied` times, and another.
    fn memory(moved: u64, denied: u64, turn: Option<Turn>) -> Look {
        let mib = |mib: u64| mib << 20;
        let suspensions = Durations { count: 3, p99_ns: 7_000_000, ..Durations::default() };
        let web = VmMemory {
            vm: "web".to_owned(),
            advertised_bytes: mib(64),
            on_card_bytes: mib(20),
            entitled_bytes: mib(24),
            quota_bytes: mib(32),
            in_host_bytes: mib(8),
            in_reserve_bytes: mib(2),
            moved_out_bytes: mib(moved),
            memory_denied: denied,
            suspensions,
            ..VmMemory::default()
        };
        let build = VmMemory { vm: "build".to_owned(), ..VmMemory::default() };
        let card = CardMemory {
            card: "card0".to_owned(),
            settings: config::CardMemory::default(),
            chunk_bytes: mib(2),
            card_bytes: mib(128),
            mediator_bytes: 0,
            spare_bytes: mib(60),
            to_scrub_bytes: 0,
            quarantined_bytes: 0,
            scrubbed_bytes: 0,
            reserve_used_bytes: 0,
            host_budget_bytes: mib(64),
            host_used_bytes: mib(10),
            moved_out_bytes: 0,
            moved_in_bytes: 0,
            turns: 0,
            copy_bytes_per_second: 0,
            turn,
            vms: vec![build, web],
        };
        Look { schedulers: Vec::new(), memories: vec![card] }
    }

    fn screen(view: &mut View, lines: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(140, lines)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |row: u16| (0..140).map(|column| buffer[(column, row)].symbol()).collect::<String>();
        (0..lines).map(|row| line(row).trim_end().to_owned()).collect()
    }

    #[test]
    fn names_are_no_commands_to_the_terminal() {
        let mut odd = card(1, 1, None);
        odd.card = "card\u{9b}2J".to_owned();
        odd.vms[0].vm = "web\x1b[31m\u{202e}".to_owned();
        let mut view = View::default();
        view.show(time(odd));
        let shown = screen(&mut view, 6).join("\n") + &view.text();
        assert!(shown.contains("\\u{9b}2J") && shown.contains("web\\u{1b}"), "{shown}");
        let bad = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        view.fail("no\x1b]0;x\x07".to_owned());
        assert!(!screen(&mut view, 6).join("\n").chars().any(bad));
        // Files and pipes get it through `Form::shown`, headings as well.
        assert!(!crate::Form::Table.shown(&view.text()).chars().any(bad));
    }

    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn waits_are_those_since_the_look_before() {
        let mut view = View::default();
        let shown = |view: &View| view.table(Page::Time).2[0].cells[5].clone();
        view.show(time(card(10, 10_000_000, None)));
        assert_eq!(shown(&view), "1 ms");
        view.show(time(card(14, 30_000_000, None)));
        assert_eq!(shown(&view), "5 ms");
        view.show(time(card(14, 30_000_000, None)));
        assert_eq!(shown(&view), "-", "nothing was started");
        // Another VM of that name.
        view.show(time(card(2, 6_000_000, None)));
        assert_eq!(shown(&view), "3 ms");
    }

    #[test]
    fn top_screen_shows_card_vms_and_errors() {
        let mut view = View::default();
        view.show(time(card(10, 10_000_000, Some(Quarantine { ends_in_ms: Some(1500) }))));
        let lines = screen(&mut view, 6);
        assert_eq!(lines[0], "card0: band; busy: compute 61.0 %; queued 8, on the card 2");
        assert_eq!(
            cells(&lines[2]),
            ["card0", "web", "compute", "50.0 %", "30.5 %", "1 ms", "5 ms", "4", "2", "QUARANTINED for 1.5 s"]
        );
        assert_eq!(cells(&lines[3])[1], "build", "an engine that is not used has no line");
        assert_eq!((&*lines[4], &*lines[5]), ("", "q ends, m shows memory, arrows scroll"));
        view.scroll_by(1);
        assert_eq!(cells(&screen(&mut view, 6)[2])[1], "build");
        view.scroll_by(9);
        view.scroll_by(-20);
        view.fail("no daemon answers".to_owned());
        let lines = screen(&mut view, 6);
        assert_eq!((cells(&lines[2])[1], &*lines[5]), ("web", "no daemon answers"));
    }

    #[test]
    fn top_memory_page_shows_amounts_moved_since_last_refresh() {
        let mut view = View::default();
        view.show(memory(6, 0, None));
        view.turn_over();
        let lines = screen(&mut view, 6);
        assert_eq!(lines[0], "card0: 128 MiB, spare 60 MiB; host memory 10 MiB of 64 MiB");
        let web = ["card0", "web", "64 MiB", "20 MiB", "24 MiB", "32 MiB", "10 MiB", "6 MiB", "7 ms", "-"];
        assert_eq!(cells(&lines[3]), web);
        assert_eq!((cells(&lines[2])[8], &*lines[5]), ("-", "q ends, m shows time, arrows scroll"));
        let turn =
            Turn { holder: "web".to_owned(), members: vec!["build".to_owned(), "web".to_owned()], quantum_ms: 1 };
        view.show(memory(10, 0, Some(turn)));
        let states =
            |view: &View| view.table(Page::Memory).2.into_iter().map(|line| line.cells[9].clone()).collect::<Vec<_>>();
        assert_eq!(states(&view), ["waits for its turn", "has its turn"]);
        let line = |view: &View| view.table(Page::Memory).2[1].clone();
        assert_eq!((line(&view).cells[7].as_str(), line(&view).tone), ("4 MiB", Tone::Odd));
        view.show(memory(10, 2, None));
        assert_eq!((line(&view).cells[9].as_str(), line(&view).tone), ("2 WITHOUT MEMORY", Tone::Bad));
        view.show(memory(10, 2, None));
        assert_eq!((line(&view).cells[9].as_str(), line(&view).tone), ("-", Tone::Odd));
    }

    #[test]
    fn text_has_both_tables() {
        let mut view = View::default();
        view.show(Look { memories: memory(6, 0, None).memories, ..time(card(1, 1, None)) });
        let text = view.text();
        assert!(text.contains("RECEIVED") && text.contains("IN HOST"), "{text}");
        assert!(text.find("busy: compute") < text.find("host memory 10 MiB"), "{text}");
    }
}
