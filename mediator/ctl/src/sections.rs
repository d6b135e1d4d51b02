//! Man page sections EXIT STATUS, FILES, EXAMPLES and SEE ALSO, generated from tables.

use clap_mangen::roff::{Roff, bold, roman};

use super::{Code, examples};

/// Meaning of each exit status.
pub(super) const STATUSES: [(Code, &str); 6] = [
    (Code::Good, "done"),
    (Code::Failed, "failed: the daemon, the card or the host could not complete the command"),
    (Code::Usage, "the command or one of its values is invalid; nothing was changed"),
    (Code::NotFound, "there is no VM, tenant, card or profile with this name"),
    (Code::Conflict, "the current state does not permit the change, or the card has too few resources left"),
    (Code::Unreachable, "the daemon does not respond, or the user has no access to its socket"),
];

/// Commands for which an exit status has a special meaning: command, status, meaning.
pub(super) const FURTHER: [(&str, &str, &str); 4] = [
    ("run", "any", "once the program has started: the status of the program"),
    ("assert", "1", "something differs from the file"),
    ("doctor", "1", "a requirement is missing"),
    ("sched replay", "1", "the scheduler's decisions differ from the recording"),
];

/// Exit statuses of mediatord(8).
pub(super) const DAEMON_STATUSES: [(u8, &str); 3] = [
    (0, "terminated by SIGTERM or SIGINT, replaced by another daemon, or the checked configuration is valid"),
    (1, "could not start or continue; the service manager restarts it"),
    (2, "the arguments or the configuration are invalid; a restart would not help"),
];

/// Pages about the daemon.
const DAEMON_PAGES: [&str; 2] = ["mediatord", "gpu-mediator.toml"];

/// Examples of mediatord(8).
pub(super) const DAEMON_EXAMPLES: [&str; 3] =
    ["mediatord --check", "mediatord --config /srv/site.toml", "mediatord --config /srv/site.toml --ignore-state"];

/// Files: path, meaning, and the pages that list the file.
const FILES: [(&str, &str, &[&str]); 7] = [
    (
        "/etc/gpu-mediator.toml",
        "configuration file of the daemon",
        &["mediatorctl", "mediatorctl-doctor", "mediatord", "gpu-mediator.toml"],
    ),
    (
        "/run/gpu-mediator/admin.sock",
        "admin socket, unless the configuration sets another path",
        &["mediatorctl", "mediatord"],
    ),
    ("/run/gpu-mediator", "sockets of VMs and tenants (`socket_dir`)", &["mediatord", "mediatorctl-run"]),
    ("/run/gpu-mediator/leases.json", "limits of tenants for one process each", &["mediatord", "mediatorctl-run"]),
    ("/var/lib/gpu-mediator", "changes made at run time (`state_dir`)", &["mediatord", "gpu-mediator.toml"]),
    ("/var/run/cdi", "CDI files for container runtimes", &["mediatorctl-tenant-cdi"]),
    (
        "/usr/lib/gpu-mediator",
        "the library that programs load, and the owner program of CUDA cards",
        &["mediatord", "mediatorctl-run"],
    ),
];

/// Returns the additional sections of a page as roff.
pub(super) fn of_page(page: &str) -> String {
    let mut roff = Roff::new();
    let item = |roff: &mut Roff, head: &str, text: &str| {
        roff.control("TP", None);
        roff.text([bold(head)]);
        roff.text([roman(text)]);
    };
    roff.control("SH", ["EXIT STATUS"]);
    if DAEMON_PAGES.contains(&page) {
        if page != "mediatord" {
            roff.text([roman("Exit status of mediatord and of mediatord --check:")]);
        }
        for (status, meaning) in DAEMON_STATUSES {
            item(&mut roff, &status.to_string(), meaning);
        }
    } else {
        for (code, meaning) in STATUSES {
            item(&mut roff, &(code as u8).to_string(), meaning);
        }
        let command = page.trim_start_matches("mediatorctl").trim_start_matches('-').replace('-', " ");
        for (_, status, meaning) in FURTHER.iter().filter(|(of, ..)| *of == command) {
            item(&mut roff, status, meaning);
        }
    }
    roff.control("SH", ["FILES"]);
    let of_page: Vec<_> = FILES.iter().filter(|(_, _, pages)| pages.contains(&page)).collect();
    if of_page.is_empty() {
        roff.text([roman("See mediatorctl(1).")]);
    }
    for (path, meaning, _) in of_page {
        item(&mut roff, path, &meaning.replace('`', ""));
    }
    let examples = match page {
        // The page's own text already contains examples.
        "gpu-mediator.toml" => Vec::new(),
        "mediatord" => DAEMON_EXAMPLES.map(str::to_owned).into(),
        _ => examples::of_page(page),
    };
    if !examples.is_empty() {
        roff.control("SH", ["EXAMPLES"]);
        roff.control("nf", None);
        for example in examples {
            roff.text([roman(example)]);
        }
        roff.control("fi", None);
    }
    roff.control("SH", ["SEE ALSO"]);
    let pages = ["mediatorctl(1)", "gpu-mediator.toml(5)", "mediatord(8)"];
    let others: Vec<_> = pages.into_iter().filter(|other| !other.starts_with(&format!("{page}("))).collect();
    roff.text([roman(others.join(", "))]);
    roff.to_roff()
}
