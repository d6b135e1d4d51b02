//! `mediatorctl top`: shows live card usage in the terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{
    self, DisableMouseCapture, EnableMouseCapture, Event, KeyCode, KeyEventKind, KeyModifiers, MouseButton, MouseEvent,
    MouseEventKind,
};
use ratatui::crossterm::execute;
use serde::Serialize;

use super::Form;
use super::client::{self, Client, ClientError};
use super::values::span;
use api::{CardMemory, CardScheduler, MemoryList, SchedulerList, Tenant, TenantList, Vm, VmList};

mod columns;
mod history;
mod memory;
mod processes;
mod time;
mod view;

use view::View;

/// Bounds of the window over which received shares are measured, in ms. The window is the refresh interval, limited to
/// these bounds.
const WINDOWS_MS: std::ops::RangeInclusive<u64> = 100..=60_000;

#[derive(Clone, Debug, Args)]
pub(super) struct Top {
    /// Name of the card; by default, all cards
    card: Option<String>,
    /// Refresh interval, which is also the window for measuring received shares
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = span)]
    interval: Duration,
    /// Prints the table once and exits; the default if the output is not a terminal
    #[arg(long)]
    once: bool,
}

/// The API's responses about the cards, for one refresh.
#[derive(Clone, Debug, Default, Serialize)]
struct Look {
    schedulers: Vec<CardScheduler>,
    memories: Vec<CardMemory>,
    tenants: Vec<Tenant>,
    vms: Vec<Vm>,
}

impl Top {
    fn look(&self, client: &Client) -> Result<Look, ClientError> {
        let interval = u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX);
        let window = interval.clamp(*WINDOWS_MS.start(), *WINDOWS_MS.end());
        let TenantList { mut tenants } = client.get("/v1/tenants")?;
        let VmList { mut vms } = client.get("/v1/vms")?;
        match &self.card {
            Some(card) => {
                tenants.retain(|tenant| tenant.all_cards().split(',').any(|one| one == card));
                vms.retain(|vm| vm.card == *card);
                let path = format!("/v1/cards/{}", client::segment(card));
                Ok(Look {
                    schedulers: vec![client.get(&format!("{path}/scheduler?window_ms={window}"))?],
                    memories: vec![client.get(&format!("{path}/memory"))?],
                    tenants,
                    vms,
                })
            }
            None => {
                let SchedulerList { schedulers } = client.get(&format!("/v1/schedulers?window_ms={window}"))?;
                let MemoryList { memories } = client.get("/v1/memory")?;
                Ok(Look { schedulers, memories, tenants, vms })
            }
        }
    }

    /// Shows the table until the operator quits. With `--once`, in another format, or without a terminal, returns one
    /// refresh as text.
    pub(super) fn run(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        let first = self.look(client)?;
        if self.once || !form.is_table() || !std::io::stdout().is_terminal() {
            return Ok(form.render(&first, |look| {
                let mut view = View::default();
                view.show(look.clone(), self.interval);
                view.text()
            }));
        }
        let mut view = View::default();
        view.show(first, self.interval);
        let mut terminal = ratatui::try_init().map_err(ClientError::Terminal)?;
        // Ignore errors: without mouse support, keys still scroll.
        let _ = execute!(std::io::stdout(), EnableMouseCapture);
        // Input must not postpone the next refresh.
        let mut due = Instant::now() + self.interval;
        let ended = loop {
            if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
                break Err(error);
            }
            match Self::wait(&mut view, due) {
                Ok(Turn::Look) => {
                    match self.look(client) {
                        Ok(look) => view.show(look, self.interval),
                        // Show the error and continue, because the daemon may become available again.
                        Err(error) => view.fail(error.to_string()),
                    }
                    due = Instant::now() + self.interval;
                }
                Ok(Turn::Draw) => {}
                Ok(Turn::End) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let _ = execute!(std::io::stdout(), DisableMouseCapture);
        ratatui::restore();
        ended.map(|()| String::new()).map_err(ClientError::Terminal)
    }

    /// Waits for an input event that requires action, but at most until `due`, the time of the next refresh.
    fn wait(view: &mut View, due: Instant) -> std::io::Result<Turn> {
        loop {
            let left = due.saturating_duration_since(Instant::now());
            if !event::poll(left)? {
                return Ok(Turn::Look);
            }
            match view.react(&event::read()?) {
                Reaction::Nothing => {}
                Reaction::Draw => return Ok(Turn::Draw),
                Reaction::End => return Ok(Turn::End),
            }
        }
    }
}

impl View {
    /// Handles a key press, a mouse event, or a resize.
    fn react(&mut self, event: &Event) -> Reaction {
        let key = match event {
            Event::Resize(..) => return Reaction::Draw,
            Event::Mouse(MouseEvent { kind: MouseEventKind::ScrollUp, .. }) => return self.scrolled(-3),
            Event::Mouse(MouseEvent { kind: MouseEventKind::ScrollDown, .. }) => return self.scrolled(3),
            Event::Mouse(MouseEvent { kind: MouseEventKind::Down(MouseButton::Left), column, row, .. }) => {
                return if self.click(*column, *row) { Reaction::Draw } else { Reaction::Nothing };
            }
            Event::Key(key) if key.kind != KeyEventKind::Release => key,
            _ => return Reaction::Nothing,
        };
        if key.code == KeyCode::Char('c') && key.modifiers == KeyModifiers::CONTROL {
            return Reaction::End;
        }
        match key.code {
            _ if self.has_help() => self.set_help(false),
            KeyCode::Enter if self.is_typing() => self.end_filter(true),
            KeyCode::Esc if self.is_typing() => self.end_filter(false),
            KeyCode::Backspace if self.is_typing() => self.type_filter(None),
            KeyCode::Char(character) if self.is_typing() => self.type_filter(Some(character)),
            KeyCode::Char('q') | KeyCode::Esc => return Reaction::End,
            KeyCode::Char('m') => self.turn_over(),
            KeyCode::Char('s') => self.reorder(),
            KeyCode::Char('/') => self.begin_filter(),
            KeyCode::Char('?' | 'h') => self.set_help(true),
            KeyCode::Up => return self.scrolled(-1),
            KeyCode::Down => return self.scrolled(1),
            KeyCode::PageUp => return self.scrolled(-10),
            KeyCode::PageDown => return self.scrolled(10),
            _ => return Reaction::Nothing,
        }
        Reaction::Draw
    }

    fn scrolled(&mut self, lines: isize) -> Reaction {
        self.scroll_by(lines);
        Reaction::Draw
    }
}

/// Effect of an input event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Nothing,
    Draw,
    End,
}

/// Next action of the event loop.
enum Turn {
    Look,
    Draw,
    End,
}
