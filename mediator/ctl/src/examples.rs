//! Two examples for each command, shown in `--help` and in the man pages.

use clap::{Command, CommandFactory};

use super::Arguments;

/// Path of a command, and two example invocations without the program's name.
type Examples = (&'static str, [&'static str; 2]);

const EXAMPLES: [Examples; 53] = [
    (
        "vm add",
        ["vm add web --card card0 --vram-mib 2G --weight 300", "vm add desk --profile desktop --label user=eva"],
    ),
    ("vm remove", ["vm remove web", "vm remove web --if-revision 18aef-3"]),
    ("vm move", ["vm move web", "vm move web --card card1"]),
    ("vm save", ["vm save web web.saved", "vm save web web.saved --force"]),
    ("vm restore", ["vm restore web web.saved", "vm restore copy web.saved"]),
    ("vm restart-workers", ["vm restart-workers web", "vm restart-workers web --pid 4242"]),
    ("vm list", ["vm list", "vm list --watch=5"]),
    ("vm show", ["vm show web", "vm show web --json"]),
    ("vm launch-args", ["vm launch-args web --memory 4G", "vm launch-args web --vmm libvirt --profile desktop"]),
    ("card show", ["card show", "card show card0 --watch"]),
    ("card drain", ["card drain card0", "card drain card0 --json"]),
    ("card undrain", ["card undrain card0", "card undrain card0 --json"]),
    ("card list", ["card list", "card list --host"]),
    ("card bind", ["card bind 0000:65:00.0", "card bind 0000:65:00.0 --json"]),
    ("card unbind", ["card unbind 0000:65:00.0", "card unbind 0000:65:00.0 --driver nouveau"]),
    ("card firmware list", ["card firmware list", "card firmware list --state-dir /srv/mediator"]),
    ("card firmware import", ["card firmware import fecs.bin gpccs.bin", "card firmware import --stand-in"]),
    ("card firmware approve", ["card firmware approve 3fa2", "card firmware approve 3fa2 77c0"]),
    ("card firmware remove", ["card firmware remove 3fa2", "card firmware remove 3fa2 --state-dir /srv/mediator"]),
    ("daemon show", ["daemon show", "daemon show --json"]),
    ("daemon upgrade", ["daemon upgrade", "daemon upgrade --json"]),
    ("sched show", ["sched show", "sched show card0 --watch"]),
    ("sched set", ["sched set card0 --policy band", "sched set card0 --strikes 3 --quarantine-s 60"]),
    ("sched set-vm", ["sched set-vm web --weight 300", "sched set-vm web --guarantee 12.5 --class interactive"]),
    ("sched release", ["sched release web", "sched release web --json"]),
    (
        "sched report",
        ["sched report card0 --out use.svg", "sched report card0 --since 10s --window 500ms --out use.svg"],
    ),
    (
        "sched record",
        ["sched record card0 --out card0.jsonl", "sched record card0 --for 5s --format perfetto --out card0.json"],
    ),
    ("sched replay", ["sched replay card0.jsonl", "sched replay card0.jsonl --policy credit"]),
    ("memory show", ["memory show", "memory show card0 --watch"]),
    ("memory set", ["memory set card0 --host-mib 16G", "memory set card0 --victims clock --reserve-mib 64M"]),
    ("memory set-quota", ["memory set-quota web 2G", "memory set-quota web default"]),
    ("memory set-guarantee", ["memory set-guarantee web 512M", "memory set-guarantee web default"]),
    ("memory set-swap-cap", ["memory set-swap-cap web 4G", "memory set-swap-cap web default"]),
    ("memory set-ram", ["memory set-ram web --ram-quota-mib 8G", "memory set-ram web --ram-touch-mib default"]),
    ("memory set-weight", ["memory set-weight web 300", "memory set-weight build 50"]),
    ("memory set-policy", ["memory set-policy web swap", "memory set-policy web queue --queue-ms 2000"]),
    ("memory pin", ["memory pin web 16M+4M", "memory pin web 0x1000000+0x400000"]),
    ("memory unpin", ["memory unpin web 16M+4M", "memory unpin web 0+1G"]),
    ("memory priority", ["memory priority web 16M+4M 255", "memory priority web 0+1G 0"]),
    (
        "memory profile record",
        ["memory profile record web --out web.txt", "memory profile record web --for 30s --out web.txt"],
    ),
    ("memory profile load", ["memory profile load web web.txt", "memory profile load copy web.txt"]),
    ("memory evict", ["memory evict web --mib 512M", "memory evict web --range 16M+4M"]),
    ("memory return", ["memory return web", "memory return web --mib 512M"]),
    ("tenant add", ["tenant add train --vram-mib 20G --weight 300", "tenant add train --profile large --card h100"]),
    ("tenant move", ["tenant move train --card gpu1", "tenant move train --json"]),
    ("tenant remove", ["tenant remove train", "tenant remove train --json"]),
    ("tenant list", ["tenant list", "tenant list --watch=5"]),
    ("tenant show", ["tenant show train", "tenant show train --json"]),
    ("tenant cdi", ["tenant cdi train --write", "tenant cdi train --remove"]),
    ("tenant set", ["tenant set train --quota-mib 24G", "tenant set train --weight 50 --on-stuck suspend"]),
    ("profile list", ["profile list", "profile list --watch"]),
    ("profile show", ["profile show desktop", "profile show desktop --json"]),
    ("run", ["run --tenant train -- python3 train.py", "run --tenant train --memory 20G -- ./program --its-option"]),
];

/// Examples for top-level commands.
const TOP: [Examples; 8] = [
    ("top", ["top", "top card0 --interval 500ms"]),
    ("events", ["events --card card0 --kind killed", "events -f"]),
    ("apply", ["apply -f site.toml --dry-run", "apply -f site.toml --prune"]),
    ("export", ["export", "export --format json --no-revision"]),
    ("assert", ["assert -f site.toml", "assert -f site.toml --exact"]),
    ("doctor", ["doctor", "doctor --config site.toml --json"]),
    ("schema", ["schema", "schema --json"]),
    ("completion", ["completion bash", "completion fish"]),
];

/// Returns the command line definition, including the examples.
pub(super) fn command() -> Command {
    EXAMPLES.iter().chain(&TOP).fold(Arguments::command(), |command, (path, uses)| {
        let text = format!("Examples:\n  mediatorctl {}\n  mediatorctl {}", uses[0], uses[1]);
        with(command, &path.split(' ').collect::<Vec<_>>(), &text)
    })
}

/// Returns the examples for a man page: those of its command, or the first example of each command in its group.
pub(super) fn of_page(page: &str) -> Vec<String> {
    let of = |(path, _): &&Examples| page == "mediatorctl" || page_of(path).starts_with(&format!("{page}-"));
    let own = EXAMPLES.iter().chain(&TOP).find(|(path, _)| page_of(path) == page);
    let uses: Vec<&str> = match own {
        Some((_, uses)) => uses.to_vec(),
        None => EXAMPLES.iter().chain(&TOP).filter(of).map(|(_, uses)| uses[0]).collect(),
    };
    uses.into_iter().map(|uses| format!("mediatorctl {uses}")).collect()
}

/// Returns the name of the man page for a command's path.
fn page_of(path: &str) -> String {
    format!("mediatorctl-{}", path.replace(' ', "-"))
}

/// Sets the text after the help of the command at `path`.
fn with(command: Command, path: &[&str], text: &str) -> Command {
    match path.split_first() {
        None => command.after_help(text.to_owned()),
        Some((first, rest)) if command.find_subcommand(first).is_some() => {
            command.mut_subcommand(*first, |inner| with(inner, rest, text))
        }
        Some(_) => command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves(command: &Command, path: &str, names: &mut Vec<(String, String)>) {
        let mut inner = command.get_subcommands().filter(|command| !command.is_hide_set()).peekable();
        if inner.peek().is_none() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            names.push((path.trim().to_owned(), help));
        }
        inner.for_each(|inner| leaves(inner, &format!("{path} {}", inner.get_name()), names));
    }

    #[test]
    fn each_command_has_two_examples_that_parse() {
        let mut names = Vec::new();
        leaves(&command(), "", &mut names);
        assert_eq!(
            names.len(),
            EXAMPLES.len() + TOP.len(),
            "an example without a command, or a command without an example"
        );
        for (name, help) in names {
            let examples: Vec<_> = help.lines().filter(|line| line.starts_with("  mediatorctl ")).collect();
            assert_eq!(examples.len(), 2, "{name}");
            assert_ne!(examples[0], examples[1], "{name}");
            for example in examples {
                assert!(example.starts_with(&format!("  mediatorctl {name}")), "{example}");
                let parsed = command().try_get_matches_from(example.split_whitespace());
                parsed.unwrap_or_else(|error| panic!("{example}: {error}"));
            }
        }
    }

    #[test]
    fn options_of_long_commands_have_headings() {
        let heading = |path: &[&str], option: &str| {
            let whole = command();
            let found = path.iter().fold(&whole, |command, name| command.find_subcommand(name).unwrap());
            let arg = found.get_arguments().find(|arg| arg.get_long() == Some(option)).unwrap();
            arg.get_help_heading().map(str::to_owned)
        };
        for (option, expected) in
            [("quota-mib", "Memory"), ("weight", "Time"), ("near", "Placement"), ("mode", "Socket")]
        {
            assert_eq!(heading(&["vm", "add"], option).as_deref(), Some(expected), "{option}");
        }
        assert_eq!(heading(&["tenant", "set"], "quota-mib").as_deref(), Some("Memory"));
        assert_eq!(heading(&[], "socket").as_deref(), Some("Global options"));
    }
}
