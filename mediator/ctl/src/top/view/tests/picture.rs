//! The picture of `top` in README.md: the screen for a recorded response, with two working tenants.

use std::fmt::Write;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};
use serde_json::Value;

use super::super::View;
use crate::top::Look;

/// Width and height of a screen, in cells.
const SCREEN: (u16, u16) = (136, 6);
/// Width and height of a cell, in pixels.
const CELL: (usize, usize) = (8, 18);
/// Width of the margin around a screen, in pixels.
const MARGIN: usize = 12;

/// Output of `mediatorctl top --json`, recorded while two tenants ran `cuda-program train` (of `cuda-rig`) on the fake
/// driver. Tenant `training` had 288 MiB and weight 300; `serving` had 160 MiB and weight 100.
const RECORDED: &str = include_str!("recorded.json");

/// Returns a cell's colour in the picture, which has a dark background.
fn colour(cell: &Cell) -> &'static str {
    match cell.fg {
        Color::Red => "#ff7b72",
        Color::Yellow => "#e3b341",
        Color::Reset => "#e6edf3",
        other => panic!("no colour for {other}"),
    }
}

/// Returns the runs of same-style cells in a line: first column, text, colour, and true if bold. A text may end with
/// one or two spaces.
fn runs(buffer: &Buffer, line: u16) -> Vec<(usize, String, &'static str, bool)> {
    let mut runs: Vec<(usize, String, &'static str, bool)> = Vec::new();
    for column in 0..buffer.area.width {
        let cell = &buffer[(column, line)];
        let style = (colour(cell), cell.modifier.contains(Modifier::BOLD));
        match runs.last_mut() {
            // Two spaces separate columns, so the text after them starts a new run.
            Some((_, text, colour, bold)) if (*colour, *bold) == style && !text.ends_with("  ") => {
                text.push_str(cell.symbol());
            }
            _ if cell.symbol() == " " => {}
            _ => runs.push((column.into(), cell.symbol().to_owned(), style.0, style.1)),
        }
    }
    runs
}

/// Returns the screens as SVG.
fn svg(screens: &[Buffer]) -> String {
    let lines: usize = screens.iter().map(|screen| usize::from(screen.area.height)).sum::<usize>() + screens.len() - 1;
    let (width, height) = (usize::from(SCREEN.0) * CELL.0 + 2 * MARGIN, lines * CELL.1 + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"monospace\" font-size=\"13\">\n<title>mediatorctl top: time and memory of a card</title>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#0d1117\"/>\n"
    );
    let mut y = MARGIN + 13;
    for screen in screens {
        for line in 0..screen.area.height {
            for (column, text, colour, bold) in runs(screen, line) {
                let text = text.trim_end();
                let (x, length) = (MARGIN + column * CELL.0, text.chars().count() * CELL.0);
                let weight = if bold { " font-weight=\"bold\"" } else { "" };
                let text = text.replace('&', "&amp;").replace('<', "&lt;");
                let _ = writeln!(
                    svg,
                    "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\" fill=\"{colour}\"{weight}>{text}</text>"
                );
            }
            y += CELL.1;
        }
        y += CELL.1;
    }
    svg + "</svg>\n"
}

#[test]
fn generated_top_picture_is_committed() {
    let recorded: Value = serde_json::from_str(RECORDED).unwrap();
    let part = |name: &str| recorded[name].clone();
    let look = Look {
        schedulers: serde_json::from_value(part("schedulers")).unwrap(),
        memories: serde_json::from_value(part("memories")).unwrap(),
        ..Look::default()
    };
    let mut view = View::default();
    view.show(look, std::time::Duration::from_secs(1));
    let mut screens = Vec::new();
    for _ in 0..2 {
        let mut terminal = Terminal::new(TestBackend::new(SCREEN.0, SCREEN.1)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        screens.push(terminal.backend().buffer().clone());
        view.turn_over();
    }
    doc_pages::file("docs/images/top.svg", &svg(&screens));
}
