//! `mediatorctl top`: the current use of the cards, in the terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use serde::Serialize;

use super::Form;
use super::client::{self, Client, ClientError};
use super::values::span;
use api::{CardMemory, CardScheduler, MemoryList, SchedulerList};

mod memory;
mod time;
mod view;

use view::View;

/// Bounds of the window of received shares, in ms. The window is the interval, within the daemon's bounds.
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

/// The API's answers about the cards, for one refresh.
#[derive(Clone, Debug, Default, Serialize)]
struct Look {
    schedulers: Vec<CardScheduler>,
    memories: Vec<CardMemory>,
}

impl Top {
    fn look(&self, client: &Client) -> Result<Look, ClientError> {
        let interval = u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX);
        let window = interval.clamp(*WINDOWS_MS.start(), *WINDOWS_MS.end());
        match &self.card {
            Some(card) => {
                let path = format!("/v1/cards/{}", client::segment(card));
                Ok(Look {
                    schedulers: vec![client.get(&format!("{path}/scheduler?window_ms={window}"))?],
                    memories: vec![client.get(&format!("{path}/memory"))?],
                })
            }
            None => {
                let SchedulerList { schedulers } = client.get(&format!("/v1/schedulers?window_ms={window}"))?;
                let MemoryList { memories } = client.get("/v1/memory")?;
                Ok(Look { schedulers, memories })
            }
        }
    }

    /// Shows the table until the operator ends it; or once, returned as text.
    pub(super) fn run(&self, client: &Client, form: Form) -> Result<String, ClientError> {
        let first = self.look(client)?;
        if self.once || form == Form::Json || !std::io::stdout().is_terminal() {
            return Ok(form.render(&first, |look| {
                let mut view = View::default();
                view.show(look.clone());
                view.text()
            }));
        }
        let mut view = View::default();
        view.show(first);
        let mut terminal = ratatui::try_init().map_err(ClientError::Terminal)?;
        let ended = loop {
            if let Err(error) = terminal.draw(|frame| view.draw(frame)) {
                break Err(error);
            }
            match self.wait(&mut view) {
                Ok(Turn::Look) => match self.look(client) {
                    Ok(look) => view.show(look),
                    // The daemon may come back.
                    Err(error) => view.fail(error.to_string()),
                },
                Ok(Turn::Draw) => {}
                Ok(Turn::End) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        ratatui::restore();
        ended.map(|()| String::new()).map_err(ClientError::Terminal)
    }

    /// Waits for a key, or until the next refresh.
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
                    KeyEvent { code: KeyCode::Char('m'), .. } => {
                        view.turn_over();
                        return Ok(Turn::Draw);
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

/// Next thing to do.
enum Turn {
    Look,
    Draw,
    End,
}
