//! Tests programs that use several cards in one process. All programs are real processes, and each card has an owner.

mod support;

use std::io::Read as _;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use support::hostile::until_accounts;
use support::{Program, Rig, built};

const CARDS: &str = env!("CARGO_BIN_EXE_cuda-cards");
const SCRIPTED: &str = env!("CARGO_BIN_EXE_cuda-scripted-owner");

/// Returns options for scripted owners that move chunks to the host and back, and end turns. A process with peer access
/// waits for the moves of all owners, so with more cards each owner moves chunks less often.
fn restless(cards: u64) -> [&'static str; 10] {
    let interval = if cards > 2 { "150" } else { "10" };
    let turns = ["--turn-us", "4000", "--run-ahead-us", "2000"];
    let [turn, turn_us, ahead, ahead_us] = turns;
    ["--relocate-ms", interval, "--batch", "6", "--device-mib", "12", turn, turn_us, ahead, ahead_us]
}

/// A machine with several cards, each with an owner.
struct Cards {
    rig: Rig,
}

impl Cards {
    fn new(mib: u64, count: u64) -> Self {
        let mut rig = Rig::new(mib);
        rig.cards = count;
        Self { rig }
    }

    fn socket(&self, card: u64) -> String {
        self.rig.folder.path().join(format!("run/card-{card}")).display().to_string()
    }

    /// Returns the sockets of all cards in the format of the environment variable.
    fn sockets(&self) -> String {
        let all: Vec<String> = (0..self.rig.cards).map(|card| self.socket(card)).collect();
        all.join(":")
    }

    /// Starts a scripted owner for a card.
    fn scripted(&self, card: u64, options: &[&str]) -> Program {
        let mut command = self.rig.command(SCRIPTED, "plain");
        command.env("CUDA_VISIBLE_DEVICES", card.to_string()).arg("--socket").arg(self.socket(card));
        let mut owner = Program::start(command.arg("--driver").arg(&self.rig.fake).args(options));
        assert_eq!(owner.line(), "ready");
        owner
    }

    /// Starts a scripted owner for each card.
    fn all_scripted(&self, options: &[&str]) -> Vec<Program> {
        (0..self.rig.cards).map(|card| self.scripted(card, options)).collect()
    }

    /// Starts the real owner for a card, with tenants `a` and `b` of 64 MiB each.
    fn serving(&self, card: u64, card_mib: u64, options: &[&str]) -> Program {
        let mut command = self.rig.command(built("cuda-owner"), "plain");
        command.arg("--driver").arg(&self.rig.fake).arg("serve").arg("--socket").arg(self.socket(card));
        command.args(["--device", &card.to_string(), "--card-mib", &card_mib.to_string()]);
        command.args(["--host-mib", "96", "--chunk-mib", "2"]);
        command.arg("--journal").arg(self.rig.folder.path().join(format!("journal-{card}")));
        let mut owner = Program::start(command.args(["--tenant", "a:64", "--tenant", "b:64"]).args(options));
        let line = owner.line();
        assert!(line.contains("ready"), "{line}");
        owner
    }

    fn command(&self, library: &str, arguments: &[&str]) -> Command {
        let mut command = self.rig.command(CARDS, library);
        if library == "shim" {
            command.env(cuda_protocol::SOCKET_VARIABLE, self.sockets()).env(cuda_protocol::TENANT_VARIABLE, "a");
        }
        command.args(arguments);
        command
    }

    fn plain(&self, arguments: &[&str]) -> String {
        text(&self.command("plain", arguments).output().expect("starts"))
    }

    fn tenant(&self, arguments: &[&str]) -> String {
        text(&self.command("shim", arguments).output().expect("starts"))
    }
}

fn text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Stops a scripted owner. Returns its counters.
fn counts(owner: Program) -> Value {
    serde_json::from_str(&owner.end()).expect("JSON")
}

/// Stops scripted owners. Returns the number of chunks that each has moved.
fn finish(owners: impl IntoIterator<Item = Program>) -> Vec<u64> {
    owners.into_iter().map(|owner| number(&counts(owner), "moved")).collect()
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

/// Queries a program's progress on a device until it is nonzero.
fn until_progress(program: &mut Program, device: usize) {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..600 {
        program.say(&device.to_string());
        if program.line().parse::<u64>().expect("a number") > 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("device {device} makes no progress");
}

#[test]
fn workload_on_each_card_has_same_results_as_without_library() {
    for count in [2, 4] {
        let cards = Cards::new(128, count);
        let owners = cards.all_scripted(&restless(cards.rig.cards));
        // Use one thread that switches contexts, one thread per card, and two threads in each card's context.
        for threads in ["0", "1", "2"] {
            let arguments = ["train", "--mib", "6", "--rounds", "24", "--threads", threads];
            assert_eq!(cards.tenant(&arguments), cards.plain(&arguments), "{count} cards, {threads} threads");
        }
        let all: Vec<Value> = owners.into_iter().map(counts).collect();
        for counts in &all {
            assert!(number(counts, "processes") == 3 && number(counts, "turns") > 0, "{counts}");
        }
        // Owners that move chunks rarely may not have moved any.
        assert!(count > 2 || all.iter().any(|counts| number(counts, "moved") > 0), "{all:?}");
    }
}

#[test]
fn work_of_measured_slices_is_counted_on_its_card() {
    let cards = Cards::new(128, 2);
    let measured = ["--run-ahead-us", "2000", "--turn-us", "5000"];
    let owners = cards.all_scripted(&measured);
    let arguments = ["train", "--mib", "6", "--threads", "0", "--rounds", "30"];
    assert_eq!(cards.tenant(&arguments), cards.plain(&arguments));
    for owner in owners {
        let counts = counts(owner);
        assert!(number(&counts, "launches") > 30, "{counts}");
    }
}

#[test]
fn copies_between_cards_survive_moving_chunks() {
    for (count, rounds) in [(2, "12"), (4, "8")] {
        let cards = Cards::new(128, count);
        let arguments = ["copies", "--rounds", rounds];
        let expected = cards.plain(&arguments);
        let owners = cards.all_scripted(&restless(cards.rig.cards));
        assert_eq!(cards.tenant(&arguments), expected, "{count} cards");
        assert!(finish(owners).into_iter().sum::<u64>() > 0 || count > 2);
    }
}

#[test]
fn peer_access_works_on_chunks_that_move() {
    let cards = Cards::new(128, 2);
    let owners = cards.all_scripted(&restless(cards.rig.cards));
    // The library reports the last two calls as unsupported.
    for _ in 0..2 {
        let output = cards.command("shim", &["peers", "--rounds", "200"]).output().expect("starts");
        let found = text(&output);
        assert_eq!(found, "[1, 0, 705, 704, 101, 1, 801, 801] 40201", "{found}");
        let error = String::from_utf8_lossy(&output.stderr);
        for name in ["cuLaunchCooperativeKernelMultiDevice", "cuMemPoolSetAccess"] {
            assert!(error.contains(&format!("{name} is not supported")), "{error}");
        }
    }
    let moved = finish(owners);
    assert!(moved[1] > 0, "{moved:?}");
}

#[test]
fn memory_of_other_card_without_access_ends_the_program() {
    let cards = Cards::new(128, 2);
    let owners = cards.all_scripted(&[]);
    for library in ["plain", "shim"] {
        for arguments in [&["trespass"][..], &["trespass", "--disables"]] {
            let output = cards.command(library, arguments).output().expect("starts");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && error.contains("to which it has no access"), "{library}: {error}");
        }
    }
    finish(owners);
}

#[test]
fn range_with_handles_of_all_cards_is_used_on_all() {
    for count in [2, 4] {
        let cards = Cards::new(128, count);
        let expected = cards.plain(&["ranges"]);
        let owners = cards.all_scripted(&["--relocate-ms", "40", "--batch", "6", "--device-mib", "4"]);
        assert_eq!(cards.tenant(&["ranges"]), expected, "{count} cards");
        for owner in owners {
            let counts = counts(owner);
            assert_eq!(number(&counts, "granted"), number(&counts, "freed"), "{counts}");
        }
    }
}

#[test]
fn contexts_with_peers_end_while_chunks_move() {
    let cards = Cards::new(128, 2);
    let owners = cards.all_scripted(&restless(cards.rig.cards));
    assert_eq!(cards.tenant(&["contexts", "--rounds", "4"]), "contexts ended");
    finish(owners);
}

#[test]
fn full_card_refuses_memory_while_other_card_has_room() {
    let cards = Cards::new(256, 2);
    let owners = [cards.scripted(0, &["--quota-mib", "20"]), cards.scripted(1, &["--quota-mib", "48"])];
    assert_eq!(cards.tenant(&["fill"]), "20 48");
    for (owner, mib) in owners.into_iter().zip([20, 48]) {
        let counts = counts(owner);
        assert_eq!(number(&counts, "granted"), mib / 2, "{counts}");
        assert!(number(&counts, "refused") > 0, "{counts}");
    }
}

#[test]
fn program_sees_its_cards_in_the_order_of_sockets() {
    let cards = Cards::new(128, 4);
    let owners = [(3, "40"), (1, "24")].map(|(card, mib)| cards.scripted(card, &["--quota-mib", mib]));
    let sockets = format!("{}:{}", cards.socket(3), cards.socket(1));
    let seen = |visible: Option<&str>| -> Value {
        let mut command = cards.command("shim", &["look"]);
        command.env(cuda_protocol::SOCKET_VARIABLE, &sockets);
        visible.map(|list| command.env("CUDA_VISIBLE_DEVICES", list));
        serde_json::from_str(&text(&command.output().expect("starts"))).expect("JSON")
    };
    let fourth = json!(["fake cuda card 3", "0000:04:00.0", 40, 40, 40]);
    let second = json!(["fake cuda card 1", "0000:02:00.0", 24, 24, 24]);
    assert_eq!(seen(None), json!([fourth, second]));
    assert_eq!(seen(Some("1")), json!([second]));
    assert_eq!(seen(Some("1,0")), json!([second, fourth]));
    assert_eq!(seen(Some("GPU-66616b65-2063-7564-6120-636172642031")), json!([second]));
    let mut command = cards.rig.command(built("cuda-hoard"), "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, &sockets).arg("cards");
    let mut hoard = Program::start(&mut command);
    let found: Value = serde_json::from_str(&hoard.line()).expect("JSON");
    hoard.kill();
    let name = |card: u64| format!("GPU-66616b65-2063-7564-6120-63617264203{card}");
    assert_eq!(found["nvml"], json!([[name(3), 0], [name(1), 1]]), "{found}");
    finish(owners);
}

#[test]
fn wrong_list_of_sockets_is_named() {
    let cards = Cards::new(128, 2);
    let owners = cards.all_scripted(&[]);
    let (first, second) = (cards.socket(0), cards.socket(1));
    let link = cards.rig.folder.path().join("run/link").display().to_string();
    std::os::unix::fs::symlink(&first, &link).expect("a link");
    let missing = cards.rig.folder.path().join("run/none").display().to_string();
    for (sockets, expected) in [
        (format!("{first}:"), "socket 2 of 2 in GPU_MEDIATOR_CUDA_SOCKET is empty, expected a path".to_owned()),
        (format!("{first}:{second}:{first}"), format!("GPU_MEDIATOR_CUDA_SOCKET names {first} twice")),
        (format!("{first}:{link}"), format!("the owners at {first} and {link} have the same card")),
        (format!("{first}:{missing}"), format!("the owner at {missing} cannot be reached")),
        (vec![first.as_str(); 17].join(":"), "names 17 sockets, expected at most 16".to_owned()),
    ] {
        let mut command = cards.command("shim", &["look"]);
        // The library reports this error even if logging is not enabled.
        command.env(cuda_protocol::SOCKET_VARIABLE, &sockets).env_remove(cuda_protocol::LOG_VARIABLE);
        let output = command.output().expect("starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(&expected), "{sockets}: {error}");
        assert!(error.contains("cuInit failed with 802"), "{error}");
    }
    finish(owners);
}

#[test]
fn closed_gate_of_one_card_does_not_stop_the_other() {
    let cards = Cards::new(128, 2);
    let closed = cards.scripted(0, &["--turn-us", "3000", "--run-ahead-us", "2000"]);
    let open = cards.scripted(1, &[]);
    let mut program = Program::start(&mut cards.command("shim", &["live"]));
    assert_eq!(program.line(), "ready");
    until_progress(&mut program, 0);
    // The turn expires, and a stopped owner does not grant another one.
    stop(&closed, libc::SIGSTOP);
    let progress = |program: &mut Program, device: &str| {
        program.say(device);
        program.line().parse::<u64>().expect("a number")
    };
    // TIMEOUT: only a failing test polls this often.
    let is_closed = (0..100).any(|_| {
        progress(&mut program, "0");
        until_progress(&mut program, 1);
        until_progress(&mut program, 1);
        progress(&mut program, "0") == 0
    });
    assert!(is_closed, "the first card continues without a turn");
    stop(&closed, libc::SIGCONT);
    until_progress(&mut program, 0);
    assert_eq!(program.end(), "ended");
    finish([closed, open]);
}

/// Sends a signal to a program of the test.
fn stop(program: &Program, signal: i32) {
    let pid = i32::try_from(program.child.id()).expect("a process");
    // UNSAFETY: sends a signal to a child of this process.
    #[allow(unsafe_code, reason = "see UNSAFETY")]
    // SAFETY: the process is a child that has not been reaped.
    let sent = unsafe { libc::kill(pid, signal) };
    assert_eq!(sent, 0);
}

#[test]
fn killed_owner_leaves_the_other_card_working_and_is_replaced() {
    let cards = Cards::new(128, 2);
    let mut first = cards.serving(0, 64, &[]);
    let second = cards.serving(1, 64, &[]);
    let mut program = Program::start(&mut cards.command("shim", &["live"]));
    assert_eq!(program.line(), "ready");
    for _ in 0..2 {
        for device in [0, 1] {
            until_progress(&mut program, device);
        }
        first.kill();
        // The gate of a card without an owner is open, and the other card is not affected.
        for device in [0, 1] {
            until_progress(&mut program, device);
        }
        program.say("alloc 1");
        assert_eq!(program.line(), "0", "the other card has memory");
        first = cards.serving(0, 64, &[]);
        until_progress(&mut program, 0);
        program.say("alloc 0");
        assert_eq!(program.line(), "0", "the next owner serves the program");
    }
    assert_eq!(program.end(), "ended");
    for mut owner in [first, second] {
        until_accounts(&mut owner, "an ended program has no memory", |view| support::chunks(view, 0) == 0);
        owner.end();
    }
}

#[test]
fn tenants_with_contention_on_both_cards_get_equal_results() {
    let cards = Cards::new(128, 2);
    let owners = [0, 1].map(|card| cards.serving(card, 40, &["--quanta", "off"]));
    let arguments = ["train", "--mib", "24", "--rounds", "60"];
    let expected = cards.plain(&arguments);
    let start = |tenant: &str| {
        let mut command = cards.command("shim", &arguments);
        command.env(cuda_protocol::TENANT_VARIABLE, tenant).stdout(Stdio::piped()).spawn().expect("starts")
    };
    let mut programs = ["a", "b"].map(start);
    for program in &mut programs {
        let mut found = String::new();
        program.stdout.take().expect("piped").read_to_string(&mut found).expect("text");
        assert!(program.wait().expect("ends").success());
        assert_eq!(found.trim(), expected);
    }
    owners.into_iter().for_each(|owner| drop(owner.end()));
}

#[test]
fn forks_of_a_program_with_several_cards_harm_nothing() {
    let cards = Cards::new(128, 2);
    let arguments = ["fork"];
    let expected = cards.plain(&arguments);
    let owners = cards.all_scripted(&restless(cards.rig.cards));
    assert_eq!(cards.tenant(&arguments), expected);
    owners.into_iter().for_each(|owner| drop(owner.end()));
}
