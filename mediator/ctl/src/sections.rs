//! The sections EXIT STATUS and FILES of the man pages, from one table.

use clap_mangen::roff::{Roff, bold, roman};

use super::Code;

/// The meaning of each exit status.
pub(super) const STATUSES: [(Code, &str); 6] = [
    (Code::Good, "done"),
    (Code::Failed, "failed: the daemon, the card or the host could not do it"),
    (Code::Usage, "the command or one of its values is wrong; nothing was changed"),
    (Code::NotFound, "no VM, tenant, card or profile has the name"),
    (Code::Conflict, "something prevents the change, or the card has not enough left"),
    (Code::Unreachable, "the daemon does not answer, or the user may not use its socket"),
];

/// Commands that give a status another meaning: command, status, meaning.
const FURTHER: [(&str, &str, &str); 4] = [
    ("run", "any", "once the program has started: the status of the program"),
    ("assert", "1", "something is not as the file says"),
    ("doctor", "1", "a check has found an error"),
    ("sched replay", "1", "the scheduler decides otherwise than in the record"),
];

/// The exit statuses of mediatord(8).
pub(super) const DAEMON_STATUSES: [(u8, &str); 3] = [
    (0, "ended by SIGTERM or SIGINT, handed over to another daemon, or the checked configuration is good"),
    (1, "could not start or continue; a service manager starts it again"),
    (2, "the arguments or the configuration are wrong; starting it again does not help"),
];

/// Files: path, meaning, and the pages that list it.
const FILES: [(&str, &str, &[&str]); 7] = [
    ("/etc/gpu-mediator.toml", "configuration of the daemon", &["mediatorctl", "mediatorctl-doctor", "mediatord"]),
    (
        "/run/gpu-mediator/admin.sock",
        "admin socket, if the configuration names no other",
        &["mediatorctl", "mediatord"],
    ),
    ("/run/gpu-mediator", "sockets of VMs and tenants (`socket_dir`)", &["mediatord", "mediatorctl-run"]),
    ("/run/gpu-mediator/leases.json", "limits of tenants that end with a process", &["mediatord", "mediatorctl-run"]),
    ("/var/lib/gpu-mediator", "changes made while the daemon ran (`state_dir`)", &["mediatord"]),
    ("/var/run/cdi", "devices for containers", &["mediatorctl-tenant-cdi"]),
    (
        "/usr/lib/gpu-mediator",
        "the library that programs load, and the owner of CUDA cards",
        &["mediatord", "mediatorctl-run"],
    ),
];

/// Returns the sections of a page, as roff.
pub(super) fn of_page(page: &str) -> String {
    let mut roff = Roff::new();
    let item = |roff: &mut Roff, head: &str, text: &str| {
        roff.control("TP", None);
        roff.text([bold(head)]);
        roff.text([roman(text)]);
    };
    roff.control("SH", ["EXIT STATUS"]);
    if page == "mediatord" {
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
    roff.to_roff()
}
