//! Tests tenants with several cards on the fake driver. Their programs have one process per card, and their kernels
//! spin until their peers on the other cards run.

mod support;

use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use ::rig::service_manager::ServiceManager;
use support::daemon::*;
use support::{Program, Rig, built};

const RANK: &str = env!("CARGO_BIN_EXE_cuda-rank");
/// A program that uses all cards in one process.
const ONE_PROCESS: &str = env!("CARGO_BIN_EXE_cuda-cards");
const CARDS: [&str; 2] = ["gpu0", "gpu1"];

/// Creates a rig with two cards, gangs `a` and `b` on both cards with weights 300 and 100, and tenant `c` on the first
/// card.
fn rig_with_gangs() -> Rig {
    two_cards(|rig, at| {
        let more = format!("cuda.device = \"{at}\"\n");
        let tenants = || gangs(16) + &tenant("c", "gpu0", "time.weight = 200\n");
        card(rig, CARDS[at], &more) + &if at == 1 { tenants() } else { String::new() }
    })
}

/// Creates a rig with two cards. `tables` returns the configuration tables for the card with the given index.
fn two_cards(tables: impl Fn(&Rig, usize) -> String) -> Rig {
    let mut rig = rig(|rig| (0..2).map(|at| tables(rig, at)).collect());
    rig.cards = 2;
    rig
}

/// Returns the tables of the gangs `a` and `b`, with `vram_mib` MiB of memory on each card.
fn gangs(vram_mib: u32) -> String {
    let gang = |name: &str, weight: u32| {
        format!(
            "[[tenant]]\nname = \"{name}\"\ncards = [\"gpu0\", \"gpu1\"]\nvram_mib = {vram_mib}\ntime.weight = {weight}\n\
             time.max_run_ms = 3000\n"
        )
    };
    gang("a", 300) + &gang("b", 100)
}

/// A program with a process on each card.
struct Ranks {
    words: PathBuf,
    ranks: Vec<Program>,
}

impl Ranks {
    fn start(rig: &Rig, tenant: &str) -> Self {
        Self::start_with(rig, tenant, 0)
    }

    /// Starts the processes with `mib` MiB of card memory each.
    fn start_with(rig: &Rig, tenant: &str, mib: u64) -> Self {
        let words = rig.folder.path().join(format!("{tenant}.words"));
        let _ = std::fs::remove_file(&words);
        let start = |at: usize| {
            let mut command = rig.command(RANK, "shim");
            let socket = rig.folder.path().join(format!("tenants/{tenant}/{}.sock", CARDS[at]));
            command.env(cuda_protocol::SOCKET_VARIABLE, socket).env(cuda_protocol::TENANT_VARIABLE, tenant);
            command.arg("--words").arg(&words).args(["--ranks", "2", "--kernel-us", "1000", "--rank", &at.to_string()]);
            command.args(["--mib", &mib.to_string()]);
            Program::start(&mut command)
        };
        let mut ranks: Vec<Program> = (0..2).map(start).collect();
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line(), "ready"));
        Self { words, ranks }
    }

    /// Returns the lowest round number of all processes.
    fn rounds(&self) -> u64 {
        let bytes = std::fs::read(&self.words).expect("readable");
        let words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("a word")));
        words.min().unwrap_or(0)
    }

    /// Waits until the program has completed `rounds` more rounds.
    fn advance(&self, rounds: u64) {
        let goal = self.rounds() + rounds;
        awaited(&format!("{} reaches round {goal}", self.words.display()), || self.rounds() >= goal);
    }

    /// Stops all processes, which must exit successfully.
    fn end(self) {
        let mut ranks = self.ranks;
        ranks.iter_mut().for_each(Program::close);
        for rank in ranks {
            assert!(rank.end().starts_with("rounds "));
        }
    }
}

/// Polls until `done` returns true.
fn awaited(what: &str, done: impl Fn() -> bool) {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..6000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{what}");
}

/// Starts a program of tenant `c` that runs and counts kernels of 1 ms.
fn single(rig: &Rig) -> Program {
    run(rig, "c", &[], &["count", "--kernel-us", "1000"])
}

/// Waits until a program of [`single`] has run `kernels` more kernels.
fn count(program: &mut Program, kernels: u64) {
    let now = |program: &mut Program| {
        program.say("");
        program.line().parse::<u64>().expect("microseconds") / 1000
    };
    let goal = now(program) + kernels;
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..6000 {
        if now(program) >= goal {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the single tenant does not reach kernel {goal}");
}

#[test]
fn gangs_next_to_a_single_tenant_make_progress_by_weight() {
    let rig = rig_with_gangs();
    let _daemon = Daemon::start(&rig);
    let (a, b) = (Ranks::start(&rig, "a"), Ranks::start(&rig, "b"));
    let mut c = single(&rig);
    a.advance(60);
    b.advance(20);
    let (first, second) = (a.rounds(), b.rounds());
    awaited("400 further rounds", || a.rounds() + b.rounds() >= first + second + 400);
    let (of_a, of_b) = (a.rounds() - first, b.rounds() - second);
    let part = of_a as f64 / (of_a + of_b) as f64;
    assert!((0.6..0.9).contains(&part), "{of_a} and {of_b} rounds instead of 3 to 1");
    count(&mut c, 50);
    let shown = json(&rig, &["tenant", "show", "a"]);
    let states = shown["card_states"].as_array().expect("a list");
    assert_eq!(states.iter().map(|state| state["card"].as_str().expect("a name")).collect::<Vec<_>>(), CARDS);
    assert!(states.iter().all(|state| state["turns"].as_u64() > Some(5) && state["served"] == true), "{shown}");
    assert_eq!(programs(&shown), 2, "{shown}");
    // The tenant as a whole is listed once, with all of its cards.
    let text = good(&rig, &["sched", "show"]);
    let whole = text.lines().filter(|line| line.starts_with("a ") && line.contains(" gpu0,gpu1 "));
    assert_eq!(whole.count(), 1, "{text}");
    let of_card = json(&rig, &["top", "gpu1", "--once"]);
    let names: Vec<_> = of_card["tenants"].as_array().expect("a list").iter().map(|one| one["name"].clone()).collect();
    assert_eq!(names, ["a", "b"], "the card is the second one of both");
    let metrics = get(&rig, "/metrics");
    let line = "gpu_mediator_tenant_programs{tenant=\"a\",card=\"gpu0,gpu1\"} 2";
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
    a.end();
    b.end();
    c.kill();
}

#[test]
fn gangs_that_do_not_fit_have_quanta_on_both_cards_together() {
    let quanta = "memory.quanta.min_ms = 300\nmemory.quanta.max_ms = 500\n";
    let rig = two_cards(|rig, at| {
        let more = format!("cuda.device = \"{at}\"\n{quanta}");
        card(rig, CARDS[at], &more).replace("mode = \"off\"", "mode = \"forced\"")
            + &if at == 1 { gangs(64) } else { String::new() }
    });
    let _daemon = Daemon::start(&rig);
    let (a, b) = (Ranks::start_with(&rig, "a", 40), Ranks::start_with(&rig, "b", 40));
    a.advance(60);
    b.advance(60);
    let holder = |card: &str| json(&rig, &["memory", "show", card])["turn"]["holder"].clone();
    let (mut together, mut apart) = (0, 0);
    for _ in 0..200 {
        let [first, second] = CARDS.map(holder);
        // The quantum may change between the two queries.
        if first == second || first == holder(CARDS[0]) {
            assert!(first.is_string() && second.is_string(), "no quanta: {first} and {second}");
            *(if first == second { &mut together } else { &mut apart }) += 1;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{together} samples together, {apart} apart");
    assert!(together > 3 * apart, "{together} samples together, {apart} apart");
    a.advance(60);
    b.advance(60);
    a.end();
    b.end();
}

#[test]
fn killed_owner_harms_nobody_else_and_gangs_continue_afterwards() {
    let rig = rig_with_gangs();
    let daemon = Daemon::start(&rig);
    let (a, b) = (Ranks::start(&rig, "a"), Ranks::start(&rig, "b"));
    let mut c = single(&rig);
    for card in [1, 0] {
        a.advance(20);
        b.advance(10);
        let owners = daemon.owners();
        signal("-KILL", &owners[card]);
        if card == 1 {
            count(&mut c, 50);
        }
        awaited("the owner is started again", || {
            json(&rig, &["tenant", "show", "a"])["card_states"][card]["turns"].as_u64() > Some(2)
        });
    }
    a.advance(50);
    b.advance(20);
    count(&mut c, 50);
    // The owners of the next daemon adopt the programs and connect to each other.
    daemon.kill();
    let _daemon = Daemon::start(&rig);
    until(&rig, "a", "its turns begin again", |a| a["card_states"][1]["turns"].as_u64() > Some(2));
    a.advance(50);
    b.advance(20);
    c.kill();
    a.end();
    b.end();
}

#[test]
fn stopped_owner_delays_only_its_gangs() {
    let rig = rig_with_gangs();
    let daemon = Daemon::start(&rig);
    let (a, b) = (Ranks::start(&rig, "a"), Ranks::start(&rig, "b"));
    let mut c = single(&rig);
    a.advance(20);
    b.advance(10);
    let owner = daemon.owners().swap_remove(1);
    signal("-STOP", &owner);
    count(&mut c, 300);
    signal("-CONT", &owner);
    a.advance(50);
    b.advance(20);
    count(&mut c, 20);
    c.kill();
    a.end();
    b.end();
}

#[test]
fn killed_program_harms_nobody_else() {
    let rig = rig_with_gangs();
    let _daemon = Daemon::start(&rig);
    let (mut a, b) = (Ranks::start(&rig, "a"), Ranks::start(&rig, "b"));
    let mut c = single(&rig);
    a.advance(20);
    b.advance(10);
    // The other process's kernels wait for a peer that has exited.
    a.ranks.remove(0).kill();
    b.advance(50);
    count(&mut c, 50);
    until(&rig, "a", "the other process exceeds its limit and is killed", |a| a["killed"] == 1 && programs(a) == 0);
    b.advance(50);
    let a = Ranks::start(&rig, "a");
    a.advance(50);
    b.advance(20);
    a.end();
    b.end();
    c.kill();
}

#[test]
fn gang_is_added_changed_and_removed_at_run_time() {
    let rig = rig_with_gangs();
    let _daemon = Daemon::start(&rig);
    let b = Ranks::start(&rig, "b");
    let refused = bad(&rig, 3, &["tenant", "add", "d", "--cards", "gpu0,gpu9", "--vram-mib", "16"]);
    assert!(refused.contains("`gpu9` is not a card of kind"), "{refused}");
    let refused = bad(&rig, 2, &["tenant", "add", "d", "--cards", "gpu0", "--vram-mib", "16"]);
    assert!(refused.contains("expected at least two cards"), "{refused}");
    good(&rig, &["tenant", "add", "d", "--cards", "gpu0,gpu1", "--vram-mib", "16", "--guarantee-mib", "8"]);
    let d = Ranks::start(&rig, "d");
    d.advance(20);
    b.advance(10);
    good(&rig, &["tenant", "set", "d", "--weight", "500"]);
    // The second card has too little memory for this guarantee, so neither card applies it.
    good(&rig, &["tenant", "add", "e", "--card", "gpu1", "--vram-mib", "56", "--guarantee-mib", "56"]);
    bad(&rig, 4, &["tenant", "set", "d", "--guarantee-mib", "16"]);
    let shown = json(&rig, &["tenant", "show", "d"]);
    assert_eq!((&shown["time"]["weight"], &shown["memory"]["guarantee_mib"]), (&500.into(), &8.into()), "{shown}");
    good(&rig, &["tenant", "remove", "d"]);
    assert!(!rig.folder.path().join("tenants/d").exists());
    bad(&rig, 3, &["tenant", "show", "d"]);
    for mut rank in d.ranks {
        assert!(!rank.child.wait().expect("ends").success(), "its programs are killed");
    }
    b.advance(20);
    b.end();
}

/// Starts a program that uses all cards of a tenant in one process.
fn in_one_process(rig: &Rig, tenant: &str, arguments: &[&str]) -> Child {
    let sockets =
        CARDS.map(|card| rig.folder.path().join(format!("tenants/{tenant}/{card}.sock")).display().to_string());
    let mut command = rig.command(ONE_PROCESS, "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, sockets.join(":")).env(cuda_protocol::TENANT_VARIABLE, tenant);
    command.args(arguments).stdout(std::process::Stdio::piped()).spawn().expect("starts")
}

/// Waits for the exit of a program, which must succeed. Returns the program's output.
fn output_of(program: Child) -> String {
    let output = program.wait_with_output().expect("ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn kernels_of_one_process_meet_on_both_cards_next_to_gangs() {
    let rig = rig_with_gangs();
    let _daemon = Daemon::start(&rig);
    let b = Ranks::start(&rig, "b");
    let mut c = single(&rig);
    // A turn can end between the launches of a round. The kernel in flight on one card then needs the submission that
    // waits on the other card.
    for ahead in ["1", "3"] {
        let program = in_one_process(&rig, "a", &["meet", "--rounds", "300", "--ahead", ahead]);
        b.advance(20);
        count(&mut c, 20);
        assert_eq!(output_of(program), "met 300");
    }
    let shown = json(&rig, &["tenant", "show", "a"]);
    assert_eq!(shown["killed"], 0, "{shown}");
    b.advance(20);
    b.end();
    c.kill();
}

#[test]
fn gangs_and_their_programs_continue_through_upgrades() {
    let rig = rig_with_gangs();
    let manager = ServiceManager::new(&rig.folder.path().join("notify")).expect("a service manager");
    let mut command = manager.command(&built("mediatord")).expect("a command");
    let fake = rig.command("true", "plain");
    command.envs(fake.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.arg("--config").arg(rig.folder.path().join("m.toml"));
    let mut first = Daemon(command.spawn().expect("starts"));
    manager.wait(Duration::from_secs(60), |heard| heard.take("READY=1")).expect("ready");
    let a = Ranks::start(&rig, "a");
    let mut c = single(&rig);
    a.advance(20);
    let owners = first.owners();
    let mut next: Option<rustix::process::Pid> = None;
    for _ in 0..2 {
        let turns = |rig: &Rig| json(rig, &["tenant", "show", "a"])["card_states"][1]["turns"].as_u64().unwrap_or(0);
        let before = turns(&rig);
        let meet = in_one_process(&rig, "b", &["meet", "--rounds", "200"]);
        let info = json(&rig, &["daemon", "upgrade"]);
        if next.is_none() {
            assert!(first.0.wait().expect("ended").success());
        }
        next =
            rustix::process::Pid::from_raw(i32::try_from(info["pid"].as_i64().expect("a number")).expect("a process"));
        // The owners, their links and the turns are the same as before.
        let alive = |owner: &String| std::path::Path::new("/proc").join(owner).exists();
        assert!(owners.iter().all(alive), "an owner has ended");
        a.advance(30);
        count(&mut c, 20);
        assert_eq!(output_of(meet), "met 200");
        until(&rig, "a", "its turns are counted on", |a| a["card_states"][1]["turns"].as_u64() > Some(before));
        // Changes that apply to both cards still reach the owners.
        good(&rig, &["tenant", "set", "a", "--weight", "200"]);
    }
    let shown = json(&rig, &["tenant", "show", "a"]);
    assert_eq!((&shown["killed"], &shown["served"]), (&0.into(), &true.into()), "{shown}");
    a.end();
    c.kill();
    let last = next.expect("the last daemon");
    rustix::process::kill_process(last, rustix::process::Signal::KILL).expect("killed");
}

/// Waits for a program that must fail.
fn fails(mut program: Program) {
    let mut text = String::new();
    std::io::Read::read_to_string(program.output(), &mut text).expect("readable");
    assert!(!program.child.wait().expect("ends").success(), "the program continues after a reset: {text}");
}

#[test]
fn reset_card_ends_only_its_own_tenants_and_tells_its_gangs() {
    let rig = rig_with_gangs();
    let _daemon = Daemon::start(&rig);
    good(&rig, &["tenant", "add", "d", "--card", "gpu1", "--vram-mib", "16"]);
    let mut a = Ranks::start(&rig, "a");
    let mut c = single(&rig);
    let mut d = run(&rig, "d", &[], &["live", "--mib", "8"]);
    d.steps(2);
    a.advance(20);
    rig.reset(1);
    // The programs on the card lose their contexts. The peer on the other card waits for a kernel that never runs.
    let lost = a.ranks.pop().expect("the process on the card");
    fails(lost);
    fails(d);
    count(&mut c, 100);
    let told = || {
        let page = json(&rig, &["events", "--tenant", "a", "--kind", "owner_lost"]);
        page["events"].as_array().expect("a list").first().cloned()
    };
    awaited("the gang is told", || told().is_some());
    let event = told().expect("an event");
    let text = event["text"].as_str().expect("a text");
    assert!(text.contains("its card `gpu1`") && text.contains("the card was reset or has failed"), "{event}");
    assert_eq!(event["card"], "gpu1");
    let of_c = json(&rig, &["events", "--tenant", "c", "--kind", "owner_lost"]);
    assert_eq!(of_c["events"], serde_json::json!([]), "the card of `c` has not failed");
    until(&rig, "a", "the peer exceeds its limit and is killed", |a| programs(a) == 0);
    until(&rig, "a", "the card is served again", |a| a["served"] == true);
    count(&mut c, 50);
    let a = Ranks::start(&rig, "a");
    a.advance(50);
    a.end();
    c.kill();
}
