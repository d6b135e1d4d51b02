//! Pages installed with the programs: man pages and shell completions.

use std::fs;
use std::io;
use std::path::Path;

use clap::{Command, CommandFactory, ValueEnum};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use super::{examples, sections};

/// Page that documents the configuration file.
const CONFIGURATION: &str = include_str!("../../../docs/reference/configuration.md");

/// Changelog, which contains the date of each version.
const CHANGELOG: &str = include_str!("../../../CHANGELOG.md");

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
    /// Returns the completion script.
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

/// Writes all man pages to a folder: mediatorctl(1), one page per command, mediatord(8) and gpu-mediator.toml(5).
pub(super) fn write(folder: &Path) -> io::Result<()> {
    // Order the global options after each command's own options.
    let mut command = examples::command().disable_help_subcommand(true).mut_args(|arg| match arg.is_global_set() {
        true => arg.display_order(900),
        false => arg,
    });
    command.build();
    write_with_subcommands(&command, folder)?;
    let daemon = config::arguments::Arguments::command();
    fs::write(folder.join("mediatord.8"), page(daemon, "mediatord", "8")?)?;
    fs::write(folder.join("gpu-mediator.toml.5"), configuration())
}

/// Writes the pages of a command and its subcommands.
fn write_with_subcommands(command: &Command, folder: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_with_subcommands(inner, folder)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    fs::write(folder.join(format!("{name}.1")), page(command.clone(), &name, "1")?)
}

/// Returns a command's page.
fn page(command: Command, name: &str, section: &str) -> io::Result<String> {
    // Omit the examples and exit statuses at the end of `--help`, because the page has its own sections for them.
    let command = command.after_help(None).after_long_help(None);
    let man = Man::new(command).section(section).date(date()).source(SOURCE).manual("gpu-mediator");
    let mut page = Vec::new();
    man.render(&mut page)?;
    Ok(without_double_breaks(&String::from_utf8_lossy(&page)) + &sections::of_page(name))
}

/// Removes a page's line breaks next to empty lines, where they have no effect.
fn without_double_breaks(page: &str) -> String {
    let lines: Vec<&str> = page.lines().collect();
    let is_empty_line = |at: Option<usize>| at.and_then(|at| lines.get(at)).is_some_and(|line| line.is_empty());
    let is_double =
        |at: usize| lines[at] == ".br" && (is_empty_line(at.checked_sub(1)) || is_empty_line(at.checked_add(1)));
    (0..lines.len()).filter(|&at| !is_double(at)).map(|at| format!("{}\n", lines[at])).collect()
}

/// Name and version in the footers of pages.
const SOURCE: &str = concat!("gpu-mediator ", env!("CARGO_PKG_VERSION"));

/// Returns this version's date from the changelog, so that the same sources produce the same pages.
fn date() -> &'static str {
    let heading = concat!("\n## ", env!("CARGO_PKG_VERSION"), " - ");
    CHANGELOG.split_once(heading).and_then(|(_, rest)| rest.lines().next()).unwrap_or_default()
}

/// Returns the page for the configuration file, as roff.
fn configuration() -> String {
    let mut roff = Roff::new();
    roff.control("TH", ["gpu-mediator.toml", "5", date(), SOURCE, "gpu-mediator"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("gpu-mediator.toml - the configuration file of mediatord(8)")]);
    roff.control("SH", ["DESCRIPTION"]);
    let paragraphs = with_whole_paragraphs(CONFIGURATION);
    let (mut code, mut lines) = (false, paragraphs.lines().skip(1).peekable());
    let mut heads: Vec<String> = Vec::new();
    // A paragraph starts at its first line of text. A heading starts a paragraph by itself.
    let mut begins = false;
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            if std::mem::take(&mut begins) && !code && !is_after_heading(&roff) {
                roff.control("PP", None);
            }
            code = !code;
            roff.control(if code { "nf" } else { "fi" }, None);
        } else if code {
            roff.text([roman(line)]);
        } else if let Some(title) = line.strip_prefix("### ").or_else(|| line.strip_prefix("#### ")) {
            roff.control("SS", [plain(title).as_str()]);
            begins = false;
        } else if let Some(title) = line.strip_prefix("## ") {
            let title = if title == "Example" { "EXAMPLES".to_owned() } else { plain(title).to_uppercase() };
            roff.control("SH", [title.as_str()]);
            begins = false;
        } else if let Some(row) = line.strip_prefix('|') {
            begins = false;
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
            begins = true;
        } else if !line.starts_with("<!--") {
            if std::mem::take(&mut begins) && !is_after_heading(&roff) {
                roff.control("PP", None);
            }
            roff.text(inlines(line));
        }
    }
    roff.to_roff() + &sections::of_page("gpu-mediator.toml")
}

/// Joins each paragraph of a page into one line, so that links do not span lines.
fn with_whole_paragraphs(page: &str) -> String {
    let mut text = String::new();
    let mut code = false;
    let mut is_joined = false;
    for line in page.lines() {
        let is_fence = line.starts_with("```");
        let is_text = !code && !is_fence && !line.is_empty() && !line.starts_with(['#', '|', '<']);
        let begins_item = line.starts_with("- ");
        let gap = if is_joined && is_text && !begins_item { " " } else { "\n" };
        text.push_str(gap);
        text.push_str(line);
        code ^= is_fence;
        is_joined = is_text;
    }
    text.trim_start().to_owned() + "\n"
}

/// Returns true if the text so far ends with a heading, which already starts a paragraph.
fn is_after_heading(roff: &Roff) -> bool {
    roff.to_roff().lines().last().is_some_and(|line| line.starts_with(".SH") || line.starts_with(".SS"))
}

/// Returns the cells of a table row. A bar within a cell is escaped with a backslash.
fn cells(row: &str) -> Vec<String> {
    let bar = "\u{1}";
    let row = row.trim_end().trim_end_matches('|').replace("\\|", bar);
    row.split('|').map(|cell| cell.trim().replace(bar, "|")).collect()
}

/// Returns a line in which words in backquotes are bold.
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
            ("mediatorctl-tenant-remove.1", &["ends its programs"]),
            ("mediatorctl-tenant-set.1", &["on\\-stuck", "quota\\-mib"]),
            ("mediatorctl-tenant-list.1", &["Lists the tenants"]),
            ("mediatorctl-tenant-show.1", &["one tenant in detail"]),
            ("gpu-mediator.toml.5", &["on_remove", "policy that chooses cards that the tenant does not name"]),
        ] {
            let text = fs::read_to_string(folder.path().join(page)).unwrap();
            for word in words {
                assert!(text.contains(word), "{page} does not contain {word}: {text}");
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
            assert!(code || !(line.contains('`') || line.contains("](")), "unconverted markup: {line}");
        }
    }

    /// Returns the sections of a page, by heading.
    fn sections_of(page: &str) -> std::collections::BTreeMap<String, &str> {
        let parts = page.split("\n.SH ").skip(1).filter_map(|part| part.split_once('\n'));
        parts.map(|(heading, text)| (heading.trim_matches('"').to_owned(), text)).collect()
    }

    #[test]
    fn each_page_has_a_date_examples_files_and_statuses() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let mut count = 0;
        for path in fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()) {
            count += 1;
            let name = path.file_name().unwrap().to_str().unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let title = text.lines().find(|line| line.starts_with(".TH ")).unwrap();
            let date = title.split_whitespace().nth(3).unwrap().replace("\\-", "-").trim_matches('"').to_owned();
            let numbers: Vec<u32> = date.split('-').map(|part| part.parse().unwrap()).collect();
            assert!(
                matches!(numbers[..], [2026..=9999, 1..=12, 1..=31]) && date.len() == 10,
                "{name}: the date is {date:?}"
            );
            let sections = sections_of(&text);
            for section in ["NAME", "DESCRIPTION", "EXIT STATUS", "FILES", "EXAMPLES", "SEE ALSO"] {
                let part = sections.get(section).unwrap_or_else(|| panic!("{name} has no section {section}"));
                assert!(part.trim().len() > 4, "{name}, {section}: {part}");
            }
            assert!(!sections.contains_key("EXTRA"), "{name}");
            if name.ends_with(".1") {
                let command = name.trim_end_matches(".1").replace('-', " ");
                let examples = sections["EXAMPLES"].replace("\\-", "-").replace("\\.", ".");
                let uses = examples.lines().filter(|line| line.starts_with("mediatorctl "));
                assert!(uses.clone().count() >= 2, "{name}: {examples}");
                let first = command.split(' ').take(2).collect::<Vec<_>>().join(" ");
                assert!(uses.clone().all(|line| line.starts_with(&first)), "{name}, {first}: {examples}");
            }
        }
        // Each command and group has a page, and so do mediatorctl itself, the daemon and the configuration.
        assert!(count > 60, "{count} pages");
    }

    /// Fails on warnings of Debian's mandoc, if installed. The package test always runs mandoc.
    #[test]
    fn mandoc_has_no_warnings_for_any_page() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let pages = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut lint = std::process::Command::new("mandoc");
        match lint.args(["-T", "lint", "-W", "warning"]).args(pages).output() {
            Ok(said) => assert!(said.stdout.is_empty(), "{}", String::from_utf8_lossy(&said.stdout)),
            Err(error) => println!("skipped: mandoc: {error}"),
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(text("mediatorctl-run.1").contains("the status of the program"));
        assert!(text("mediatorctl.1").contains("/etc/gpu\\-mediator.toml"), "{}", text("mediatorctl.1"));
        assert!(text("mediatorctl-vm-add.1").contains("\\-\\-vram\\-mib"));
        assert!(text("mediatorctl-apply.1").contains("\\-\\-prune"));
        assert!(text("mediatord.8").contains("\\-\\-ignore\\-state"));
        assert!(text("gpu-mediator.toml.5").starts_with(".TH gpu-mediator.toml 5"));
    }

    #[test]
    fn examples_of_the_daemon_can_be_parsed() {
        use clap::Parser;
        for example in sections::DAEMON_EXAMPLES {
            config::arguments::Arguments::try_parse_from(example.split(' ')).unwrap();
        }
    }

    #[test]
    fn shells_complete_commands_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = shell.completion();
            assert!(text.contains("launch-args") && text.contains("dry-run"), "{shell:?}");
        }
    }
}
