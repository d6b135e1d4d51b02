//! The screen: a table of the cards' time, or of their memory.

use std::time::Duration;

use admin_client::terminal;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line as Text;
use ratatui::widgets::{Block, Clear, Paragraph, Row, TableState};

use super::columns::{self, Column, Kind, SPACING};
use super::history::History;
use super::{Look, memory, time};
use crate::output::{self, scheduler};

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
    /// Amounts to sort by: received share or moved memory, the longest waits or suspensions, memory on the card.
    pub(super) amounts: [u64; 3],
}

/// The table on the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Time,
    Memory,
}

/// Names of the orders: the API's, and by each of a line's amounts, largest first.
const ORDERS: [[&str; 4]; 2] = [
    ["name", "received share", "wait", "memory on the card"],
    ["name", "moved memory", "suspension", "memory on the card"],
];

/// Lines of the help.
const HELP: [&str; 8] = [
    "q, Esc     end",
    "m          other page: time or memory",
    "s          next order",
    "/          filter by card and VM; Enter keeps it, Esc drops it",
    "arrows     scroll, as do PageUp, PageDown and the wheel",
    "?          this help, also h; any key closes it",
    "SHARE      received part, with | at the entitled part",
    "yellow     strikes, or memory in the host; red: act",
];

/// Contents of the screen.
#[derive(Debug, Default)]
pub(super) struct View {
    look: Look,
    /// Waits at the last refresh.
    waits: time::Waits,
    counts: memory::Counts,
    history: History,
    page: Page,
    /// Index of the order.
    order: usize,
    filter: String,
    /// The operator writes the filter.
    typing: bool,
    help: bool,
    /// Why the last refresh failed.
    error: Option<String>,
    scroll: TableState,
}

impl View {
    /// Shows the results of a refresh, one of each `interval`.
    pub(super) fn show(&mut self, look: Look, interval: Duration) {
        let before = std::mem::replace(&mut self.look, look);
        self.error = None;
        self.waits = time::waits(&before.schedulers);
        self.counts = memory::counts(&before.memories);
        self.history.add(&self.look.schedulers, interval);
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

    /// Sorts by the next order.
    pub(super) fn reorder(&mut self) {
        self.order = (self.order + 1) % ORDERS[0].len();
        self.scroll = TableState::default();
    }

    /// Shows or hides the help.
    pub(super) fn set_help(&mut self, shown: bool) {
        self.help = shown;
    }

    /// Returns true if the help is shown.
    pub(super) fn has_help(&self) -> bool {
        self.help
    }

    /// Begins to read a filter.
    pub(super) fn begin_filter(&mut self) {
        self.typing = true;
    }

    /// Returns true if keys are part of the filter.
    pub(super) fn is_typing(&self) -> bool {
        self.typing
    }

    /// Appends to the filter; `None` removes the last character.
    pub(super) fn type_filter(&mut self, typed: Option<char>) {
        match typed {
            Some(character) => self.filter.push(character),
            None => {
                self.filter.pop();
            }
        }
        self.scroll = TableState::default();
    }

    /// Ends the reading of a filter, and keeps or drops it.
    pub(super) fn end_filter(&mut self, keep: bool) {
        self.typing = false;
        if !keep {
            self.filter.clear();
        }
    }

    fn table(&self, page: Page) -> (Vec<String>, &'static [Column], Vec<Line>) {
        let Look { schedulers, memories } = &self.look;
        match page {
            Page::Time => (
                schedulers.iter().map(time::head).collect(),
                &time::TABLE,
                time::lines(schedulers, memories, &self.waits, &self.history),
            ),
            Page::Memory => {
                (memories.iter().map(memory::head).collect(), &memory::TABLE, memory::lines(memories, &self.counts))
            }
        }
    }

    /// Returns the lines of the page that pass the filter, in the operator's order.
    fn lines(&self, lines: Vec<Line>) -> Vec<Line> {
        let passes = |line: &Line| line.cells.iter().take(2).any(|cell| cell.contains(&self.filter));
        let mut lines: Vec<Line> = lines.into_iter().filter(passes).collect();
        if let Some(amount) = self.order.checked_sub(1) {
            lines.sort_by_key(|line| std::cmp::Reverse(line.amounts.get(amount).copied()));
        }
        lines
    }

    /// Returns both tables as text, for output that is not a terminal.
    pub(super) fn text(&self) -> String {
        if self.look.schedulers.is_empty() {
            return scheduler::cards(&[]);
        }
        let text = [Page::Time, Page::Memory].map(|page| {
            let (heads, table, lines) = self.table(page);
            let shown: Vec<usize> = (0..table.len()).filter(|&index| table[index].kind != Kind::Picture).collect();
            let head = shown.iter().map(|&index| table[index].head.to_owned()).collect();
            let cells = |line: Line| shown.iter().filter_map(|&index| line.cells.get(index).cloned()).collect();
            let rows = std::iter::once(head).chain(lines.into_iter().map(cells)).collect();
            let numbers: Vec<usize> = (0..shown.len()).filter(|&at| table[shown[at]].kind == Kind::Number).collect();
            format!("{}\n\n{}", heads.join("\n"), output::table(rows, &numbers))
        });
        text.join("\n")
    }

    /// Draws the selected table.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let width = usize::from(area.width);
        let (heads, table, lines) = self.table(self.page);
        let heads: Vec<Text<'_>> =
            heads.iter().flat_map(|head| columns::wrapped(&terminal::word(head), width)).map(Text::from).collect();
        // The table has at least its head and one line.
        let count = u16::try_from(heads.len()).unwrap_or(u16::MAX).min(area.height.saturating_sub(3));
        let [top, middle, bottom] =
            Layout::vertical([Constraint::Length(count), Constraint::Min(2), Constraint::Length(1)]).areas(area);
        frame.render_widget(Paragraph::new(heads), top);
        let (tones, rows): (Vec<Tone>, Vec<Vec<String>>) = self
            .lines(lines)
            .into_iter()
            .map(|line| {
                (line.tone, line.cells.iter().map(|cell| terminal::word(cell).into_owned()).collect::<Vec<_>>())
            })
            .unzip();
        let fitting = columns::fit(table, &rows, width);
        let aligned = |(index, width): (usize, usize), text: &str| {
            let text = Text::from(columns::shortened(text, width));
            if table[index].kind == Kind::Number { text.right_aligned() } else { text }
        };
        let rows = tones.iter().zip(&rows).map(|(tone, cells)| {
            let style = match tone {
                Tone::Bad => Style::new().fg(Color::Red),
                Tone::Odd => Style::new().fg(Color::Yellow),
                Tone::Good => Style::new(),
            };
            let cells = fitting.iter().map(|&column| aligned(column, cells.get(column.0).map_or("", String::as_str)));
            Row::new(cells).style(style)
        });
        let head = Row::new(fitting.iter().map(|&column| aligned(column, table[column.0].head)));
        let head = head.style(Style::new().add_modifier(Modifier::BOLD));
        let widths = fitting.iter().map(|&(_, width)| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
        let spacing = u16::try_from(SPACING).unwrap_or(1);
        let table = ratatui::widgets::Table::new(rows, widths).header(head).column_spacing(spacing);
        frame.render_stateful_widget(table, middle, &mut self.scroll);
        frame.render_widget(self.last_line(), bottom);
        if self.help {
            let height = u16::try_from(HELP.len()).unwrap_or(0).saturating_add(2);
            let box_area = ratatui::layout::Rect { height: height.min(area.height), ..area };
            frame.render_widget(Clear, box_area);
            let lines: Vec<_> = HELP.into_iter().map(Text::from).collect();
            frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Keys")), box_area);
        }
    }

    /// Returns the line at the bottom: an error, the filter, or the keys.
    fn last_line(&self) -> Text<'_> {
        if let Some(error) = &self.error {
            return Text::styled(terminal::word(error).into_owned(), Style::new().fg(Color::Red));
        }
        let filter = terminal::word(&self.filter);
        if self.typing {
            return Text::from(format!("filter: {filter}_"));
        }
        let (other, orders) = match self.page {
            Page::Time => ("memory", ORDERS[0]),
            Page::Memory => ("time", ORDERS[1]),
        };
        let mut text = format!("q ends, ? helps, m shows {other}");
        if let Some(order) = orders.get(self.order).filter(|_| self.order > 0) {
            text.push_str(&format!(", by {order}"));
        }
        if !filter.is_empty() {
            text.push_str(&format!(", only `{filter}`"));
        }
        Text::from(text)
    }

    /// Scrolls down, or up when `lines` is less than 0.
    pub(super) fn scroll_by(&mut self, lines: isize) {
        let most = self.lines(self.table(self.page).2).len().saturating_sub(1);
        let at = self.scroll.offset().saturating_add_signed(lines).min(most);
        *self.scroll.offset_mut() = at;
    }
}

#[cfg(test)]
mod tests;
