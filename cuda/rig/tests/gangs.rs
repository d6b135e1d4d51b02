//! Tests tenants with several cards on the fake driver. Their programs have one process per card, and their kernels
//! spin until their peers on the other cards run.

mod support;

use std::path::PathBuf;
use std::time::Duration;

use support::daemon::*;
use support::{Program, Rig};

const RANK: &str = env!("CARGO_BIN_EXE_cuda-rank");
const CARDS: [&str; 2] = ["gpu0", "gpu1"];

/// Creates a rig with two cards, gangs `a` and `b` on both cards with weights 300 and 100, and tenant `c` on the first
/// card.
fn rig_with_gangs() -> Rig {
    let gang = |name: &str, weight: u32| {
        format!(
            "[[tenant]]\nname = \"{name}\"\ncards = [\"gpu0\", \"gpu1\"]\nvram_mib = 16\ntime.weight = {weight}\n\
             time.max_run_ms = 3000\n"
        )
    };
    let mut rig = rig(|rig| {
        let cards = (0..2).map(|at| card(rig, CARDS[at], &format!("cuda.device = \"{at}\"\n")));
        cards.collect::<String>() + &gang("a", 300) + &gang("b", 100) + &tenant("c", "gpu0", "time.weight = 200\n")
    });
    rig.cards = 2;
    rig
}

/// A program with a process on each card.
struct Ranks {
    words: PathBuf,
    ranks: Vec<Program>,
}

impl Ranks {
    fn start(rig: &Rig, tenant: &str) -> Self {
        let words = rig.folder.path().join(format!("{tenant}.words"));
        let _ = std::fs::remove_file(&words);
        let start = |at: usize| {
            let mut command = rig.command(RANK, "shim");
            let socket = rig.folder.path().join(format!("tenants/{tenant}/{}.sock", CARDS[at]));
            command.env(cuda_protocol::SOCKET_VARIABLE, socket).env(cuda_protocol::TENANT_VARIABLE, tenant);
            command.arg("--words").arg(&words).args(["--ranks", "2", "--kernel-us", "1000", "--rank", &at.to_string()]);
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

    /// Ends all processes, which must exit successfully.
    fn end(self) {
        let mut ranks = self.ranks;
        ranks.iter_mut().for_each(Program::close);
        for rank in ranks {
            assert!(rank.end().starts_with("rounds "));
        }
    }
}

/// Polls until a condition holds.
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
    a.end();
    b.end();
    c.kill();
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
