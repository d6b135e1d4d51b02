//! The screen: a table of the cards' time, the cards' memory, or processes.

use std::cmp::Reverse;
use std::time::Duration;

use admin_client::terminal;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line as Text;
use ratatui::widgets::{Block, Clear, Paragraph, Row, TableState};

use super::columns::{self, Column, Kind, SPACING};
use super::history::History;
use super::{Look, memory, processes, time};
use crate::output::{self, scheduler};

/// Style of a table line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    /// The normal style.
    Good,
    /// The state is unusual, but requires no action.
    Odd,
    /// The operator should act.
    Bad,
}

/// A cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) text: String,
    /// Sort key, if the text is a number.
    pub(super) amount: Option<u64>,
}

impl Cell {
    /// Creates a cell for an amount.
    pub(super) fn number(text: String, amount: u64) -> Self {
        Self { text, amount: Some(amount) }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), amount: None }
    }
}

/// A table line. Its first two cells are the card, and the virtual machine or tenant.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) cells: Vec<Cell>,
    pub(super) tone: Tone,
}

impl Line {
    /// Returns the line's card, and its virtual machine or tenant.
    fn user(&self) -> Option<User> {
        let [card, name, ..] = &self.cells[..] else { return None };
        Some(User { card: card.text.clone(), name: name.text.clone() })
    }
}

/// A virtual machine or tenant of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    card: String,
    name: String,
}

/// A table to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Time,
    Memory,
    Processes,
}

impl Page {
    const ALL: [Self; 3] = [Self::Time, Self::Memory, Self::Processes];

    /// Returns the page's columns.
    fn columns(self) -> &'static [Column] {
        match self {
            Self::Time => &time::TABLE,
            Self::Memory => &memory::TABLE,
            Self::Processes => &processes::TABLE,
        }
    }

    /// Returns the columns through which the sort key cycles, in order.
    fn orders(self) -> &'static [&'static str] {
        match self {
            Self::Time => &["RECEIVED", "WAIT 99 %", "ON CARD"],
            Self::Memory => &["MOVED", "SUSPENDED 99 %", "ON CARD"],
            Self::Processes => &["PROCESS", "PID", "WINDOW"],
        }
    }

    /// Returns the next page, and its name.
    fn next(self) -> (Self, &'static str) {
        match self {
            Self::Time => (Self::Memory, "memory"),
            Self::Memory => (Self::Processes, "processes"),
            Self::Processes => (Self::Time, "time"),
        }
    }
}

/// Sort order by one column: numbers descending, words ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    column: usize,
    is_reversed: bool,
}

/// Screen positions, for handling clicks.
#[derive(Clone, Debug, Default)]
struct Places {
    /// Screen area of the table, including its header.
    table: Rect,
    /// Screen range of each table column, with the column's index.
    columns: Vec<(std::ops::Range<u16>, usize)>,
}

/// Lines of the help screen.
const HELP: [&str; 10] = [
    "q, Esc     end",
    "m          next page: time, memory or processes",
    "s          sort by the next column; click a header to sort by it,",
    "           and again to reverse",
    "/          filter by card and VM; Enter applies it, Esc drops it",
    "click      select a VM or tenant; its processes appear at the bottom",
    "arrows     scroll, as do PageUp, PageDown and the wheel",
    "?          this help, also h; any key closes it",
    "SHARE      received share, with | at the entitled share",
    "yellow     strikes, or memory in the host; red: action needed",
];

/// Contents and state of the screen.
#[derive(Debug, Default)]
pub(super) struct View {
    look: Look,
    /// Waits at the refresh before the shown one.
    waits: time::Waits,
    counts: memory::Counts,
    history: History,
    page: Page,
    /// Sort order; `None` means the API's order.
    order: Option<Order>,
    selected: Option<User>,
    places: Places,
    filter: String,
    /// Set while the operator types the filter.
    typing: bool,
    help: bool,
    /// Reason why the last refresh failed.
    error: Option<String>,
    scroll: TableState,
}

impl View {
    /// Shows the results of a refresh. Refreshes occur once per `interval`.
    pub(super) fn show(&mut self, look: Look, interval: Duration) {
        let before = std::mem::replace(&mut self.look, look);
        self.error = None;
        self.waits = time::waits(&before.schedulers);
        self.counts = memory::counts(&before.memories);
        self.history.add(&self.look.schedulers, interval);
    }

    /// Records that a refresh has failed.
    pub(super) fn fail(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Switches to the next page.
    pub(super) fn turn_over(&mut self) {
        self.page = self.page.next().0;
        self.order = None;
        self.scroll = TableState::default();
    }

    /// Sorts by the next of the page's main columns; after the last one, restores the API's order.
    pub(super) fn reorder(&mut self) {
        let orders = self.page.orders();
        let present = self.order.and_then(|order| self.page.columns().get(order.column)).map(|column| column.head);
        let at = present.and_then(|head| orders.iter().position(|order| *order == head)).map_or(0, |at| at + 1);
        let head = orders.get(at);
        let column = self.page.columns().iter().position(|column| Some(&column.head) == head);
        self.order = column.map(|column| Order { column, is_reversed: false });
        self.scroll = TableState::default();
    }

    /// Sorts by the column whose header was clicked, or selects the clicked line. While the help is shown, only hides
    /// the help. Returns true if the click had an effect.
    pub(super) fn click(&mut self, column: u16, row: u16) -> bool {
        if self.help {
            self.help = false;
            return true;
        }
        let Rect { y, height, .. } = self.places.table;
        if row < y || row >= y.saturating_add(height) {
            return false;
        }
        let Some(line) = (row - y).checked_sub(1) else {
            let hit = self.places.columns.iter().find(|(range, _)| range.contains(&column));
            let Some(&(_, column)) = hit else { return false };
            let is_reversed = self.order.is_some_and(|order| order.column == column && !order.is_reversed);
            self.order = Some(Order { column, is_reversed });
            self.scroll = TableState::default();
            return true;
        };
        let at = self.scroll.offset().saturating_add(usize::from(line));
        let Some(user) = self.lines(self.table(self.page).1).get(at).and_then(Line::user) else { return false };
        // A second click clears the selection.
        self.selected = if self.selected.as_ref() == Some(&user) { None } else { Some(user) };
        true
    }

    /// Shows or hides the help.
    pub(super) fn set_help(&mut self, shown: bool) {
        self.help = shown;
    }

    /// Returns true if the help is shown.
    pub(super) fn has_help(&self) -> bool {
        self.help
    }

    /// Starts reading a filter.
    pub(super) fn begin_filter(&mut self) {
        self.typing = true;
    }

    /// Returns true while keys are added to the filter.
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

    /// Ends the filter input, and applies or drops the filter.
    pub(super) fn end_filter(&mut self, keep: bool) {
        self.typing = false;
        if !keep {
            self.filter.clear();
        }
    }

    /// Returns a page's headers and lines.
    fn table(&self, page: Page) -> (Vec<String>, Vec<Line>) {
        let Look { schedulers, memories, .. } = &self.look;
        match page {
            Page::Time => (
                schedulers.iter().map(time::head).collect(),
                time::lines(schedulers, memories, &self.waits, &self.history),
            ),
            Page::Memory => (memories.iter().map(memory::head).collect(), memory::lines(memories, &self.counts)),
            Page::Processes => (Vec::new(), processes::lines(&self.look)),
        }
    }

    /// Returns the lines that pass the filter, in the selected order.
    fn lines(&self, lines: Vec<Line>) -> Vec<Line> {
        let passes = |line: &Line| line.cells.iter().take(2).any(|cell| cell.text.contains(&self.filter));
        let mut lines: Vec<Line> = lines.into_iter().filter(passes).collect();
        if let Some(Order { column, is_reversed }) = self.order {
            // Both sorts are stable: equal lines stay in the API's order.
            let key = |line: &Line| {
                let cell = line.cells.get(column).cloned().unwrap_or_else(|| String::new().into());
                (Reverse(cell.amount), cell.text)
            };
            match is_reversed {
                false => lines.sort_by_key(key),
                true => lines.sort_by_key(|line| Reverse(key(line))),
            }
        }
        lines
    }

    /// Returns all tables as text, for `--once` and for output that is not a terminal.
    pub(super) fn text(&self) -> String {
        if self.look.schedulers.is_empty() {
            return scheduler::cards(&[]);
        }
        let mut text = Vec::new();
        for page in Page::ALL {
            let (heads, lines) = self.table(page);
            if page == Page::Processes && lines.is_empty() {
                continue;
            }
            let table = page.columns();
            let shown: Vec<usize> = (0..table.len()).filter(|&index| table[index].kind != Kind::Picture).collect();
            let head = shown.iter().map(|&index| table[index].head.to_owned()).collect();
            let cells = |line: Line| {
                shown.iter().filter_map(|&index| line.cells.get(index).map(|cell| cell.text.clone())).collect()
            };
            let rows = std::iter::once(head).chain(lines.into_iter().map(cells)).collect();
            let numbers: Vec<usize> = (0..shown.len()).filter(|&at| table[shown[at]].kind == Kind::Number).collect();
            let heads: String = heads.iter().map(|head| format!("{head}\n")).collect();
            let gap = if heads.is_empty() { "" } else { "\n" };
            text.push(format!("{heads}{gap}{}", output::table(rows, &numbers)));
        }
        text.join("\n")
    }

    /// Draws the screen.
    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let width = usize::from(area.width);
        let table = self.page.columns();
        let (heads, lines) = self.table(self.page);
        let heads: Vec<Text<'_>> =
            heads.iter().flat_map(|head| columns::wrapped(&terminal::word(head), width)).map(Text::from).collect();
        // Leave space for the table header, one row, and the bottom line.
        let count = u16::try_from(heads.len()).unwrap_or(u16::MAX).min(area.height.saturating_sub(3));
        let [top, middle, bottom] =
            Layout::vertical([Constraint::Length(count), Constraint::Min(2), Constraint::Length(1)]).areas(area);
        frame.render_widget(Paragraph::new(heads), top);
        let lines = self.lines(lines);
        let styles = lines.iter().map(|line| self.style(line));
        let rows: Vec<Vec<String>> = lines
            .iter()
            .map(|line| line.cells.iter().map(|cell| terminal::word(&cell.text).into_owned()).collect())
            .collect();
        let fitting = columns::fit(table, &rows, width);
        let aligned = |(index, width): (usize, usize), text: &str| {
            let text = Text::from(columns::shortened(text, width));
            if table[index].kind == Kind::Number { text.right_aligned() } else { text }
        };
        let rows = styles.zip(&rows).map(|(style, cells)| {
            let cells = fitting.iter().map(|&column| aligned(column, cells.get(column.0).map_or("", String::as_str)));
            Row::new(cells).style(style)
        });
        let head = Row::new(fitting.iter().map(|&column| {
            let text = aligned(column, table[column.0].head);
            let is_order = self.order.is_some_and(|order| order.column == column.0);
            if is_order { text.style(Style::new().add_modifier(Modifier::UNDERLINED)) } else { text }
        }));
        let head = head.style(Style::new().add_modifier(Modifier::BOLD));
        let widths = fitting.iter().map(|&(_, width)| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
        let spacing = u16::try_from(SPACING).unwrap_or(1);
        let shown = ratatui::widgets::Table::new(rows, widths).header(head).column_spacing(spacing);
        self.places = Places { table: middle, columns: places(&fitting, middle.x) };
        frame.render_stateful_widget(shown, middle, &mut self.scroll);
        frame.render_widget(self.last_line(), bottom);
        if self.help {
            let height = u16::try_from(HELP.len()).unwrap_or(0).saturating_add(2);
            let box_area = Rect { height: height.min(area.height), ..area };
            frame.render_widget(Clear, box_area);
            let lines: Vec<_> = HELP.into_iter().map(Text::from).collect();
            frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Keys")), box_area);
        }
    }

    /// Returns a line's style.
    fn style(&self, line: &Line) -> Style {
        let style = match line.tone {
            Tone::Bad => Style::new().fg(Color::Red),
            Tone::Odd => Style::new().fg(Color::Yellow),
            Tone::Good => Style::new(),
        };
        let is_selected = self.selected.is_some() && line.user() == self.selected;
        if is_selected { style.add_modifier(Modifier::REVERSED) } else { style }
    }

    /// Returns the bottom line: an error, the filter, the selection's processes, or the key help.
    fn last_line(&self) -> Text<'_> {
        if let Some(error) = &self.error {
            return Text::styled(terminal::word(error).into_owned(), Style::new().fg(Color::Red));
        }
        let filter = terminal::word(&self.filter);
        if self.typing {
            return Text::from(format!("filter: {filter}_"));
        }
        if let Some(User { card, name }) = &self.selected {
            let processes = processes::in_words(&self.look, card, name);
            let processes = processes.unwrap_or_else(|| "no processes".to_owned());
            return Text::from(terminal::word(&format!("{name}: {processes}")).into_owned());
        }
        let mut text = format!("q: quit, ?: help, m: show {}", self.page.next().1);
        if let Some(Order { column, is_reversed }) = self.order {
            let head = self.page.columns().get(column).map_or("", |column| column.head);
            text.push_str(&format!(", by {head}{}", if is_reversed { ", reversed" } else { "" }));
        }
        if !filter.is_empty() {
            text.push_str(&format!(", only `{filter}`"));
        }
        Text::from(text)
    }

    /// Scrolls down by `lines`, or up if negative.
    pub(super) fn scroll_by(&mut self, lines: isize) {
        let most = self.lines(self.table(self.page).1).len().saturating_sub(1);
        let at = self.scroll.offset().saturating_add_signed(lines).min(most);
        *self.scroll.offset_mut() = at;
    }
}

/// Returns the screen range of each table column, with the column's index.
fn places(fitting: &[(usize, usize)], left: u16) -> Vec<(std::ops::Range<u16>, usize)> {
    let mut at = usize::from(left);
    let mut places = Vec::new();
    for &(index, width) in fitting {
        let end = at.saturating_add(width);
        let column = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
        places.push((column(at)..column(end), index));
        at = end.saturating_add(SPACING);
    }
    places
}

#[cfg(test)]
mod tests;
