//! Pages that come with the programs: man pages, and completion for shells.

use std::fs;
use std::io;
use std::path::Path;

use clap::{CommandFactory, ValueEnum};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use super::{examples, sections};

/// The page that describes the configuration file.
const CONFIGURATION: &str = include_str!("../../../docs/reference/configuration.md");

/// A shell that completes commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Shell {
    /// bash, with the package bash-completion
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
}

impl Shell {
    /// Returns the script.
    pub fn completion(self) -> String {
        let shell = match self {
            Self::Bash => clap_complete::Shell::Bash,
            Self::Zsh => clap_complete::Shell::Zsh,
            Self::Fish => clap_complete::Shell::Fish,
        };
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut examples::command(), "mediatorctl", &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

/// Writes all man pages into a folder: mediatorctl(1) and one for each of its commands, mediatord(8),
/// gpu-mediator.toml(5).
pub(super) fn write(folder: &Path) -> io::Result<()> {
    // The global options are described once, with mediatorctl itself.
    let command = examples::command().mut_args(|arg| match arg.is_global_set() {
        true => arg.display_order(900),
        false => arg,
    });
    clap_mangen::generate_to(command, folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(page) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".1")) else { continue };
        fs::write(&path, with_examples(&fs::read_to_string(&path)?) + &sections::of_page(page))?;
    }
    let daemon = Man::new(config::arguments::Arguments::command()).section("8");
    let mut page = Vec::new();
    daemon.render(&mut page)?;
    let page = with_examples(&String::from_utf8_lossy(&page)) + &sections::of_page("mediatord");
    fs::write(folder.join("mediatord.8"), page)?;
    fs::write(folder.join("gpu-mediator.toml.5"), configuration())
}

/// Returns a page whose last words are the section EXAMPLES. Exit codes, which `--help` ends with, have their own.
fn with_examples(page: &str) -> String {
    match page.split_once("\n.SH EXTRA\n") {
        None => page.to_owned(),
        Some((before, rest)) if rest.starts_with("Exit codes:") => {
            let (_, after) = rest.split_once("\n.SH ").unwrap_or_default();
            format!("{before}\n.SH {after}")
        }
        Some((before, rest)) => {
            format!("{before}\n.SH EXAMPLES\n{}", rest.strip_prefix("Examples:\n").unwrap_or(rest))
        }
    }
}

/// Returns the page on the configuration file, as roff.
fn configuration() -> String {
    let mut roff = Roff::new();
    roff.control("TH", ["gpu-mediator.toml", "5", "", concat!("gpu-mediator ", env!("CARGO_PKG_VERSION"))]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("gpu-mediator.toml - the configuration file of mediatord(8)")]);
    roff.control("SH", ["DESCRIPTION"]);
    let (mut code, mut lines) = (false, CONFIGURATION.lines().skip(1).peekable());
    let mut heads: Vec<String> = Vec::new();
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            code = !code;
            roff.control(if code { "nf" } else { "fi" }, None);
        } else if code {
            roff.text([roman(line)]);
        } else if let Some(title) = line.strip_prefix("### ") {
            roff.control("SS", [plain(title).as_str()]);
        } else if let Some(title) = line.strip_prefix("## ") {
            roff.control("SH", [plain(title).to_uppercase().as_str()]);
        } else if let Some(row) = line.strip_prefix('|') {
            let cells = cells(row);
            if lines.peek().is_some_and(|next| next.starts_with("|---")) {
                heads = cells;
                lines.next();
                continue;
            }
            roff.control("TP", None);
            roff.text([bold(cells.first().map(|cell| plain(cell)).unwrap_or_default())]);
            let rest = heads.iter().zip(&cells).skip(1).filter(|(_, cell)| !cell.is_empty());
            let (last, short): (Vec<_>, Vec<_>) = rest.partition(|(head, _)| *head == "meaning");
            let short: Vec<_> = short.iter().map(|(head, cell)| format!("{head}: {}", plain(cell))).collect();
            roff.text([roman(short.join("; "))]);
            for (_, meaning) in last {
                roff.control("br", None);
                roff.text(inlines(meaning));
            }
        } else if line.is_empty() {
            roff.control("PP", None);
        } else {
            roff.text(inlines(line));
        }
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman("mediatord(8), mediatorctl(1)")]);
    roff.to_roff()
}

/// Returns the cells of a row of a table. A bar within a cell is escaped with a backslash.
fn cells(row: &str) -> Vec<String> {
    let bar = "\u{1}";
    let row = row.trim_end().trim_end_matches('|').replace("\\|", bar);
    row.split('|').map(|cell| cell.trim().replace(bar, "|")).collect()
}

/// Returns a line with words in backquotes in bold.
fn inlines(line: &str) -> Vec<Inline> {
    let parts = without_links(line);
    let styled = |(index, part): (usize, &str)| if index % 2 == 1 { bold(part) } else { roman(part) };
    parts.split('`').enumerate().map(styled).collect()
}

fn plain(text: &str) -> String {
    without_links(text).replace('`', "")
}

/// Returns the text with links replaced by their words.
fn without_links(text: &str) -> String {
    let mut shown = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once("](") {
        let Some((words_from, words)) = before.rsplit_once('[') else {
            shown.push_str(before);
            rest = link;
            continue;
        };
        shown.push_str(words_from);
        shown.push_str(words);
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_become_their_words() {
        assert_eq!(without_links("see [below](#a) and [`x`](b.md#c), end"), "see below and `x`, end");
        assert_eq!(without_links("`[vm.time]` stays"), "`[vm.time]` stays");
        assert_eq!(cells(" `a` | b\\|c |  |"), ["`a`", "b|c", ""]);
    }

    #[test]
    fn every_command_of_tenants_has_a_page_with_its_options() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        for (page, words) in [
            ("mediatorctl-run.1", &["tenant", "preload", "weight"][..]),
            ("mediatorctl-tenant-add.1", &["card", "on\\-remove", "guarantee\\-mib", "socket\\-path"]),
            ("mediatorctl-tenant-remove.1", &["its programs end"]),
            ("mediatorctl-tenant-set.1", &["on\\-stuck", "quota\\-mib"]),
            ("mediatorctl-tenant-list.1", &["Lists the tenants"]),
            ("mediatorctl-tenant-show.1", &["all about one tenant"]),
            ("gpu-mediator.toml.5", &["on_remove", "where most room is"]),
        ] {
            let text = fs::read_to_string(folder.path().join(page)).unwrap();
            for word in words {
                assert!(text.contains(word), "{page} says nothing of {word}: {text}");
            }
        }
    }

    #[test]
    fn page_of_the_configuration_has_every_key() {
        let page = configuration();
        for key in ["admin_socket", "state_dir", "vram_mib", "hang_limit_ms", "guarantee_permille"] {
            assert!(page.contains(&format!(".TP\n\\fB{key}\\fR\n")), "{key}\n{page}");
        }
        let mut code = false;
        for line in page.lines() {
            code = line == ".nf" || (code && line != ".fi");
            assert!(code || !(line.contains('`') || line.contains("](")), "a mark is left: {line}");
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        for page in fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
            let name = page.file_name().unwrap().to_str().unwrap();
            let text = fs::read_to_string(&page).unwrap();
            if name.starts_with("mediator") {
                assert!(text.contains(".SH \"EXIT STATUS\"\n") && text.contains(".SH FILES\n"), "{name}: {text}");
                assert!(!text.contains("EXTRA"), "{name}: {text}");
            }
        }
        assert!(text("mediatorctl-run.1").contains("the status of the program"));
        assert!(text("mediatorctl-vm-add.1").contains(".SH EXAMPLES\n"), "{}", text("mediatorctl-vm-add.1"));
        assert!(text("mediatorctl.1").contains("/etc/gpu\\-mediator.toml"), "{}", text("mediatorctl.1"));
        assert!(text("mediatorctl-vm-add.1").contains("\\-\\-vram\\-mib"));
        assert!(text("mediatorctl-apply.1").contains("\\-\\-prune"));
        assert!(text("mediatord.8").contains("\\-\\-ignore\\-state"));
        assert!(text("gpu-mediator.toml.5").starts_with(".TH gpu-mediator.toml 5"));
    }

    #[test]
    fn shells_complete_commands_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = shell.completion();
            assert!(text.contains("launch-args") && text.contains("dry-run"), "{shell:?}");
        }
    }
}
