//! Tests that a program cannot keep turns or memory from others, even if it lies, stops, exits, or cannot be killed.

use std::time::Duration;

use cuda_protocol::{End, FromOwner, FromTenant, Usage};

use crate::support::hostile::*;
use crate::support::{Program, Rig, describe, owner, owner_by};

/// Starts a neighbour, and a raw client of tenant `a` that gets the turn and never ends it.
fn holder(rig: &Rig, serving: &mut Program, raw: &mut Raw, through: Through) -> (usize, Neighbour) {
    let mut neighbour = Neighbour::start(rig, "b", &[]);
    let (link, answer) = raw.hello("a", through, Some(Manner::default()));
    assert!(matches!(answer, Some(FromOwner::Welcome(_))), "{answer:?}");
    // The client has no work yet.
    assert_has_share(serving, &mut neighbour, 1000);
    neighbour.report();
    raw.say(link, FromTenant::Waiting { card: 0 }, 1);
    raw.wait_for(link, |message| matches!(message, FromOwner::Run(_)).then_some(()));
    (link, neighbour)
}

/// Checks that the neighbour makes progress, and that the attacker has lost its turn and memory.
fn serves_the_neighbour_only(serving: &mut Program, neighbour: &mut Neighbour) {
    neighbour.works();
    until_accounts(serving, "the attacker has no turn and no memory", |view| {
        ["programs", "chunks_on_card", "chunks_in_host"].iter().all(|key| account(view, 0, key) == 0)
    });
    assert_has_share(serving, neighbour, 1000);
}

/// Waits until the attacker's overrun turn has ended, that is, until the attacker is no longer charged.
fn until_turn_ends(serving: &mut Program) {
    let last = std::cell::Cell::new((0, 0));
    until_accounts(serving, "the attacker's turn ends", |view| {
        let (charged, (before, unchanged)) = (account(view, 0, "charged_ns"), last.get());
        last.set((charged, if charged == before { unchanged + 1 } else { 0 }));
        last.get().1 >= 5
    });
}

/// The owner's time limit for a turn in these tests, in ms.
const LIMIT_MS: u32 = 1500;

/// Checks that the neighbour never waited longer than the limit on the attacker's turn.
fn waited_once_for_the_limit(neighbour: &mut Neighbour) {
    let report = neighbour.report();
    let limit = f64::from(LIMIT_MS);
    // The extra second allows for a busy host.
    assert!(report.longest_wait_ms <= limit + 1000.0, "{report:?}");
    assert!(report.refused == 0, "requests for memory do not wait for the turn: {report:?}");
}

/// Waits until no thread of a process runs. On a busy host, this may take some time after the signal.
fn until_stopped(pid: &str) {
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).expect("readable").flatten();
    let runs = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        !stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    while tasks().any(runs) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_connection_of_a_process_that_has_exited_is_refused() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &[&["--quanta", "off"], &NEVER_IDLE[..]].concat());
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let raw = std::cell::RefCell::new(Raw::start(&rig, None));
    let connect = |through| {
        let mut raw = raw.borrow_mut();
        let (link, _) = raw.hello("a", through, Some(Manner::default()));
        raw.close(link);
    };
    assert_keeps(
        &mut serving,
        &mut neighbour,
        || (0..2).for_each(|_| connect(Through::Itself)),
        || [Through::Child, Through::Zombie].into_iter().for_each(connect),
    );
    let mut raw = raw.into_inner();
    for through in [Through::Child, Through::Zombie] {
        let link = raw.connect(through, Some(Manner::default()));
        raw.say(link, FromTenant::Hello(hello("a", false)), 1);
        let (messages, closed) = raw.hear(link, 100, Duration::from_secs(10));
        let welcome = messages.iter().any(|message| matches!(message, FromOwner::Welcome(_)));
        assert!(closed && !welcome, "{through:?}: {messages:?}");
    }
    // The process has exited before the owner accepts the connection.
    for through in [Through::Child, Through::Zombie] {
        let pid = serving.child.id().to_string();
        crate::support::daemon::signal("-STOP", &pid);
        until_stopped(&pid);
        let link = raw.connect(through, Some(Manner::default()));
        crate::support::daemon::signal("-CONT", &pid);
        let (messages, closed) = raw.hear(link, 100, Duration::from_secs(10));
        assert!(closed && messages == [FromOwner::Goodbye(End::Denied)], "{through:?}: {messages:?}");
    }
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    neighbour.end();
    describe(serving);
}

#[test]
fn process_that_abandons_connection_loses_slice_and_memory() {
    let rig = Rig::new(256);
    // Use a high limit on work, so that the limit does not end the turn.
    let limits = ["--quanta", "off", "--max-run-ms", "600000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut raw = Raw::start(&rig, None);
    let (link, mut neighbour) = holder(&rig, &mut serving, &mut raw, Through::Itself);
    raw.say(link, FromTenant::Allocate { request: 1, card: 0, chunks: 4 }, 1);
    until_accounts(&mut serving, "the client has its chunks", |view| account(view, 0, "chunks_on_card") == 4);
    // From now on, the client's child keeps the connection open.
    raw.desert();
    until_accounts(&mut serving, "its connection is closed", |view| account(view, 0, "programs") == 0);
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn unkillable_program_of_other_user_is_given_up() {
    if !is_root() {
        return;
    }
    let rig = Rig::new(256);
    // Run the owner with the privileges of the packaged unit, except `CAP_KILL`.
    let without = ["setpriv", "--bounding-set=-kill", "--inh-caps=-kill"];
    let limits = ["--quanta", "off", "--max-run-ms", &LIMIT_MS.to_string()];
    let mut serving = owner_by(&rig, &without, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut raw = Raw::start(&rig, Some(4242));
    let (link, mut neighbour) = holder(&rig, &mut serving, &mut raw, Through::Itself);
    until_accounts(&mut serving, "the program is given up", |view| account(view, 0, "programs") == 0);
    waited_once_for_the_limit(&mut neighbour);
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    let (_, closed) = raw.hear(link, 1000, Duration::from_secs(10));
    assert!(closed, "its connection is closed");
    let view = accounts(&mut serving);
    assert_eq!((account(&view, 0, "killed"), account(&view, 0, "kill_failures")), (0, 1), "{view}");
    // The process still runs, but is not served again.
    let (_, answer) = raw.hello("a", Through::Itself, Some(Manner::default()));
    assert!(!matches!(answer, Some(FromOwner::Welcome(_))), "{answer:?}");
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    neighbour.end();
    drop(raw);
    describe(serving);
}

#[test]
fn a_program_that_can_be_killed_is_and_is_counted() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", &LIMIT_MS.to_string()];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut raw = Raw::start(&rig, is_root().then_some(4242));
    let (_, mut neighbour) = holder(&rig, &mut serving, &mut raw, Through::Itself);
    until_accounts(&mut serving, "the program is given up", |view| account(view, 0, "programs") == 0);
    waited_once_for_the_limit(&mut neighbour);
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    assert!(!raw.program.child.wait().expect("ends").success());
    let view = accounts(&mut serving);
    assert_eq!((account(&view, 0, "killed"), account(&view, 0, "kill_failures")), (1, 0), "{view}");
    neighbour.end();
    describe(serving);
}

/// Runs a client that fills the card and replies to orders according to `manner`, next to a neighbour that also needs
/// most of the card. Checks that the neighbour gets its share of turns and memory.
fn decline(manner: Manner) {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", "1500", "--patience-ms", "3000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut raw = Raw::start(&rig, None);
    let (link, _) = raw.hello("a", Through::Itself, Some(manner));
    assert_eq!(raw.allocate(link, 1, 32).len(), 32, "all of the card");
    let mut neighbour = Neighbour::start(&rig, "b", &["--mib", "40"]);
    // While the client declines orders, the neighbour gets all its turns, and eventually its share of the memory.
    assert_has_share(&mut serving, &mut neighbour, 1000);
    let half = |view: &serde_json::Value| account(view, 1, "chunks_on_card") >= 16;
    until_accounts(&mut serving, "the neighbour gets its part of the card", half);
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    describe(serving);
}

#[test]
fn program_that_never_quiesces_does_not_keep_memory() {
    decline(Manner { quiesce: Reply::Declined, ..Manner::honest() });
}

#[test]
fn a_program_that_redirects_nothing_keeps_no_memory_from_others() {
    decline(Manner { redirect: Reply::Declined, ..Manner::honest() });
}

#[test]
fn program_adopted_after_lost_connection_is_not_killed() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut program = rig.program("a", &["live", "--mib", "8"]);
    program.steps(3);
    // Like a full queue, shutting down the socket ends the connection, and both sides continue.
    break_connection(program.child.id());
    program.steps(3);
    until_accounts(&mut serving, "the program is adopted", |view| account(view, 0, "chunks_on_card") >= 4);
    // TIMEOUT: a process that continues without its connection is killed after 5 s.
    std::thread::sleep(Duration::from_secs(7));
    program.grow();
    assert_eq!(program.end(), "held 6");
    let view = describe(serving);
    assert_eq!(account(&view, 0, "killed"), 0, "{view}");
}

#[test]
fn nothing_waits_for_a_program_that_is_stopped_in_its_turn() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", "3000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut stopped = Neighbour::start(&rig, "a", &["--mib", "16"]);
    stopped.report();
    crate::support::daemon::signal("-STOP", &stopped.program.child.id().to_string());
    // The neighbour's allocations and turns, and queries of the owner's accounts, do not wait for the stopped program.
    let mut raw = Raw::start(&rig, None);
    let (link, _) = raw.hello("b", Through::Itself, Some(Manner::honest()));
    let asked = std::time::Instant::now();
    assert_eq!(raw.allocate(link, 1, 8).len(), 8);
    let view = accounts(&mut serving);
    assert_eq!(account(&view, 0, "programs"), 1, "the program is not given up yet: {view}");
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    drop(raw);
    let mut neighbour = Neighbour::begin(&rig, "b", &[]);
    neighbour.works();
    // The neighbour works for longer than the stopped program's limit.
    let charged = account(&accounts(&mut serving), 1, "charged_ns");
    until_accounts(&mut serving, "the neighbour works", |view| {
        account(view, 1, "charged_ns") > charged + 4_000_000_000
    });
    assert_has_share(&mut serving, &mut neighbour, 1000);
    let view = accounts(&mut serving);
    assert_eq!(
        (account(&view, 0, "programs"), account(&view, 0, "killed")),
        (1, 0),
        "the program is not given up: {view}"
    );
    crate::support::daemon::signal("-CONT", &stopped.program.child.id().to_string());
    assert_has_share(&mut serving, &mut neighbour, 500);
    assert!(stopped.report().kernels > 0, "the program has its turns again");
    stopped.end();
    neighbour.end();
    describe(serving);
}

/// Starts a program that, while alone on the card, submits 0.6 s of work and then opens a capture. The neighbour starts
/// afterwards.
fn capture(stream: &str, max_run_ms: &str) -> (Rig, Program, Program, Neighbour) {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", max_run_ms];
    let serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let arguments = ["open-capture", "--kernel-us", "100000", "--kernels", "6", "--stream", stream];
    let mut program = rig.program("a", &arguments);
    assert_eq!(program.line(), "captures");
    let neighbour = Neighbour::begin(&rig, "b", &[]);
    (rig, serving, program, neighbour)
}

/// Streams whose earlier work can be observed to complete while a capture is open.
const STREAMS: [&str; 5] = ["other", "default", "thread", "same", "destroyed"];

#[test]
fn work_before_a_capture_that_stays_open_is_its_own_tenants() {
    for stream in STREAMS {
        let (_rig, mut serving, mut program, mut neighbour) = capture(stream, "60000");
        // The neighbour does not wait for the work to complete: the card switches between both tenants, and each is
        // charged for half of the time.
        neighbour.works();
        until_turn_ends(&mut serving);
        let charged = account(&accounts(&mut serving), 0, "charged_ns");
        assert!(charged >= 500_000_000, "{stream}: {charged} ns");
        // The capture is still open and valid, and does not cost the neighbour any turns.
        if stream == STREAMS[0] {
            assert_has_share(&mut serving, &mut neighbour, 1000);
        }
        program.say("end it");
        let us: u64 = program.end().parse().expect("a number");
        assert!(us >= 601_000, "{stream}: {us}");
        neighbour.end();
        let view = describe(serving);
        assert_eq!([0, 1].map(|tenant| account(&view, tenant, "killed")), [0, 0], "{view}");
    }
}

#[test]
fn a_capture_that_stays_open_gets_its_own_program_killed() {
    // Work in another thread's per-thread stream cannot be observed, so the program's turn lasts until its limit.
    for stream in ["other", "other-thread"] {
        let (_rig, mut serving, mut program, mut neighbour) = capture(stream, "1000");
        neighbour.works();
        let view = until_accounts(&mut serving, stream, |view| account(view, 0, "killed") == 1);
        assert_eq!(account(&view, 1, "killed"), 0, "{stream}: the neighbour pays with its program: {view}");
        assert!(!program.child.wait().expect("ends").success());
        assert_has_share(&mut serving, &mut neighbour, 1000);
        neighbour.end();
        describe(serving);
    }
}

#[test]
fn work_submitted_during_open_capture_is_charged() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", "60000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let arguments = ["open-capture", "--kernel-us", "100000", "--kernels", "1", "--beside", "5"];
    let mut program = rig.program("a", &arguments);
    assert_eq!(program.line(), "captures");
    program.say("more");
    assert_eq!(program.line(), "launched");
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    // The neighbour does not wait for the work to complete: the card switches between both tenants, and each is charged
    // for half of the time.
    until_turn_ends(&mut serving);
    let charged = account(&accounts(&mut serving), 0, "charged_ns");
    assert!(charged >= 500_000_000, "{charged} ns");
    assert_has_share(&mut serving, &mut neighbour, 1000);
    program.say("end it");
    assert_eq!(program.end(), "601000");
    neighbour.end();
    describe(serving);
}

#[test]
fn work_in_a_threads_own_stream_is_waited_for_and_charged() {
    // A defect would appear in every round, so one fair round suffices.
    const ROUNDS: usize = 5;
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 64, &["--quanta", "off"]);
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    // A kernel takes longer than a slice. An event recorded by another thread would complete before the kernel, and end
    // the turn too early.
    let mut program = rig.program("a", &["count", "--kernel-us", "40000", "--own"]);
    let us = |program: &mut Program| {
        program.say("how much");
        program.line().parse::<u64>().expect("a number")
    };
    us(&mut program);
    let mut shares = Vec::new();
    // If the host runs the program late after a kernel, the program requests its next turn late, and the neighbour
    // works meanwhile.
    let is_fair = (0..ROUNDS).any(|_| {
        let (before, used_before) = (accounts(&mut serving), us(&mut program));
        neighbour.during(Duration::from_secs(2));
        let (used, after) = (us(&mut program), accounts(&mut serving));
        let [mine, other] =
            [0, 1].map(|tenant| account(&after, tenant, "charged_ns") - account(&before, tenant, "charged_ns"));
        let used = used - used_before;
        assert!(mine / 1000 * 10 >= used * 9, "{used} us were used, {} charged", mine / 1000);
        let [mine, all] = [mine, mine + other].map(|ns| ns / 1_000_000);
        shares.push(format!("{mine} of {all} ms"));
        // Both tenants always have work. The program gets at least 96 % of its half, except for one slice that a kernel
        // overruns.
        mine + 55 >= all * 48 / 100
    });
    assert!(is_fair, "{shares:?}");
    assert_eq!(program.end(), "counted");
    neighbour.end();
    describe(serving);
}

#[test]
fn unsuspendable_program_does_not_block_other_suspensions() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--suspend", "--max-run-ms", "1000", "--patience-ms", "6000"];
    // Keep turns from ending while a program is idle, because a turn could end before the program stalls on a busy
    // host.
    let mut serving = owner(&rig, 64, &[&limits[..], &NEVER_IDLE].concat());
    let stuck = |tenant| {
        let mut program = rig.program(tenant, &["stall", "--mib", "8"]);
        assert_eq!(program.line(), "holds");
        program.say("stall");
        assert_eq!(program.line(), "stalled");
        program
    };
    // Both programs have the turn and do not reply. The neighbour needs the first program's memory. The first program
    // is also stopped, so the driver would wait for it forever.
    let (mut first, second) = (stuck("a"), stuck("a"));
    crate::support::daemon::signal("-STOP", &first.child.id().to_string());
    let mut neighbour = Neighbour::begin(&rig, "b", &["--mib", "60"]);
    neighbour.works();
    let view =
        until_accounts(&mut serving, "the other program is suspended", |view| account(view, 0, "suspended") == 1);
    assert_eq!(account(&view, 0, "killed"), 0, "{view}");
    assert!(!first.child.wait().expect("ends").success(), "the program is killed after the driver's time limit");
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    second.kill();
    describe(serving);
}

#[test]
fn program_bypassing_gate_is_killed_instead_of_neighbour() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", "5000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut neighbour = Neighbour::start(&rig, "b", &[]);
    let mut command = rig.command(crate::support::built("cuda-hoard"), "shim");
    command.env(cuda_protocol::SOCKET_VARIABLE, rig.socket()).env(cuda_protocol::TENANT_VARIABLE, "a");
    let mut past = Program::start(command.args(["occupy", "--ms", "60000"]));
    assert_eq!(past.line(), "60000");
    let view = until_accounts(&mut serving, "a program is killed", |view| {
        (0..2).any(|tenant| account(view, tenant, "killed") > 0)
    });
    assert_eq!([0, 1].map(|tenant| account(&view, tenant, "killed")), [1, 0], "{view}");
    assert!(!past.child.wait().expect("ends").success());
    assert_has_share(&mut serving, &mut neighbour, 1000);
    neighbour.end();
    describe(serving);
}

#[test]
fn stopped_with_kernel_in_flight_costs_its_own_program() {
    let rig = Rig::new(256);
    let limits = ["--quanta", "off", "--max-run-ms", "5000"];
    let mut serving = owner(&rig, 64, &[&limits, &NEVER_IDLE[..]].concat());
    let mut raw = Raw::start(&rig, None);
    let (link, mut neighbour) = holder(&rig, &mut serving, &mut raw, Through::Itself);
    // The kernel runs for twelve times the limit.
    raw.launch(60_000);
    let turn = raw.wait_for(link, |message| match message {
        FromOwner::Stop { turn, .. } => Some(turn),
        _ => None,
    });
    raw.say(link, FromTenant::Stopped { card: 0, turn, usage: Usage::default(), waiting: false }, 1);
    let view = until_accounts(&mut serving, "a program is killed", |view| {
        (0..2).any(|tenant| account(view, tenant, "killed") > 0)
    });
    assert_eq!([0, 1].map(|tenant| account(&view, tenant, "killed")), [1, 0], "{view}");
    assert!(!raw.program.child.wait().expect("ends").success());
    serves_the_neighbour_only(&mut serving, &mut neighbour);
    neighbour.end();
    describe(serving);
}
