//! Tests share groups with MPS servers on the fake driver. All programs are real processes.

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use support::daemon::*;
use support::{Program, Rig};

/// Emulation of `nvidia-cuda-mps-control`.
const MPS: &str = env!("CARGO_BIN_EXE_cuda-fake-mps");
/// Number of kernels per program to compare.
const KERNELS: usize = 150;

/// Creates a rig with tenants of the given names and groups, whose programs run concurrently.
fn grouped(tenants: &[(&str, &str)]) -> Rig {
    shared(tenants, "together")
}

/// Creates a rig with tenants of the given names and groups, and the given `sharing` mode.
fn shared(tenants: &[(&str, &str)], sharing: &str) -> Rig {
    let group = |group: &str| format!("share_group = \"{group}\"\nsharing = \"{sharing}\"\n");
    let mut rig = rig(|rig| {
        let tables = tenants.iter().map(|(name, of)| tenant(name, "fake", &group(of)));
        card(rig, "fake", &format!("cuda.mps_control = \"{MPS}\"\n")) + &tables.collect::<String>()
    });
    rig.records = true;
    rig
}

fn count(rig: &Rig, tenant: &str) -> Program {
    run(rig, tenant, &[], &["count", "--kernel-us", "1000"])
}

/// Polls until `look` returns a value.
fn awaited<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    // TIMEOUT: only a failing test waits this long.
    for _ in 0..1200 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{what}");
}

/// A kernel in the fake driver's record.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    /// Process ID of the kernel's MPS server, or 0 without a server.
    server: u64,
    begin: u64,
    end: u64,
}

/// Returns a program's recorded kernels.
fn kernels(rig: &Rig, program: &Program) -> Vec<Kernel> {
    let text = std::fs::read_to_string(rig.folder.path().join("card/kernels")).unwrap_or_default();
    let kernel = |line: &str| {
        let numbers: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let &[pid, server, begin, end] = &numbers[..] else { return None };
        (pid == u64::from(program.child.id())).then_some(Kernel { server, begin, end })
    };
    text.lines().filter_map(kernel).collect()
}

/// Returns the number of kernels in `one` that ran concurrently with kernels in `other` for more than half of their
/// duration.
fn concurrent(one: &[Kernel], other: &[Kernel]) -> usize {
    let overlap = |a: &Kernel, b: &Kernel| a.end.min(b.end).saturating_sub(a.begin.max(b.begin));
    let is_next = |kernel: &&Kernel| {
        other.iter().map(|other| overlap(kernel, other)).sum::<u64>() * 2 > kernel.end - kernel.begin
    };
    one.iter().filter(is_next).count()
}

/// Waits until enough kernels are recorded. Returns the kernels that two programs ran while both were working.
fn together(rig: &Rig, programs: [&Program; 2]) -> [Vec<Kernel>; 2] {
    awaited("both work", || {
        let all = programs.map(|program| kernels(rig, program));
        let start = all.iter().filter_map(|kernels| kernels.get(20)).map(|kernel| kernel.begin).max()?;
        let after = all.map(|kernels| kernels.into_iter().filter(|kernel| kernel.begin > start).collect::<Vec<_>>());
        after.iter().all(|kernels| kernels.len() >= KERNELS).then_some(after)
    })
}

fn group_state(rig: &Rig, tenant: &str) -> Value {
    json(rig, &["tenant", "show", tenant])["group_state"].clone()
}

/// Waits until these tenants' programs take part in their group.
fn until_together(rig: &Rig, tenants: &[&str]) {
    for name in tenants {
        until(rig, name, "it takes part", |tenant| tenant["group_state"]["takes_part"] == true);
    }
}

/// Returns the folder of a group's server.
fn folder(rig: &Rig, group: &str) -> PathBuf {
    rig.folder.path().join("fake.mps").join(group)
}

/// Returns true if a process has not exited.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    // A zombie counts as exited, because the process that adopts it may not reap it.
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// Waits for a group's server other than `old`. Returns its process ID.
fn server(rig: &Rig, group: &str, old: &str) -> String {
    let pipes = folder(rig, group).join("pipes");
    let found = || {
        let names = std::fs::read_dir(&pipes).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let pids = names.filter_map(|name| Some(name.to_str()?.strip_prefix("server-")?.to_owned()));
        // The socket of a killed server remains.
        pids.into_iter().find(|pid| pid != old && runs(pid))
    };
    awaited("the server runs", found)
}

fn control(rig: &Rig, group: &str) -> String {
    let record = std::fs::read_to_string(folder(rig, group).join("control.pid")).expect("it runs");
    record.split(' ').next().expect("a number").to_owned()
}

/// Waits for `count` events of a kind, and returns their texts.
fn events(rig: &Rig, kind: &str, count: usize) -> Vec<String> {
    awaited(kind, || {
        let page = json(rig, &["events", "--kind", kind]);
        let texts = page["events"].as_array().expect("a list").iter().filter_map(|event| event["text"].as_str());
        let texts: Vec<String> = texts.map(str::to_owned).collect();
        (texts.len() >= count).then_some(texts)
    })
}

/// Waits for the exit of a program that has lost its contexts.
fn lost(mut program: Program) {
    assert!(!program.child.wait().expect("ends").success(), "its calls fail");
}

/// Waits until a program has made progress according to its own counter.
fn works(program: &mut Program) {
    let mut count = || {
        program.say("how much");
        program.line().parse::<u64>().expect("a number")
    };
    let before = count();
    while count() < before + 100_000 {}
}

#[test]
fn members_of_a_group_are_inside_kernels_at_once() {
    let rig = grouped(&[("a", "g"), ("b", "g")]);
    let _daemon = Daemon::start(&rig);
    let programs = [count(&rig, "a"), count(&rig, "b")];
    until_together(&rig, &["a", "b"]);
    let [one, other] = together(&rig, programs.each_ref());
    assert!(one[0].server != 0 && one[0].server == other[0].server, "both are clients of one server");
    awaited("kernels of both run at once", || {
        let [one, other] = programs.each_ref().map(|program| kernels(&rig, program));
        (concurrent(&one, &other) > KERNELS).then_some(())
    });
    let shown = group_state(&rig, "a");
    assert_eq!((&shown["mps"], &shown["together"]), (&"serves".into(), &true.into()), "{shown}");
    assert!(good(&rig, &["tenant", "show", "a"]).contains("g, together: together"));
    drop(programs.map(Program::end));
}

#[test]
fn automatic_group_works_together_when_that_is_faster() {
    let rig = shared(&[("a", "g"), ("b", "g")], "auto");
    let _daemon = Daemon::start(&rig);
    let programs = [count(&rig, "a"), count(&rig, "b")];
    // A probe has two parts of 0.6 s, in which at most 600 kernels per program run concurrently. The next probe begins
    // 30 s later.
    awaited("the group works together after the trial", || {
        let latest = programs.each_ref().map(|program| {
            let all = kernels(&rig, program);
            all[all.len().saturating_sub(1500)..].to_vec()
        });
        (concurrent(&latest[0], &latest[1]) > 1000).then_some(())
    });
    assert_eq!(group_state(&rig, "a")["together"], true, "{}", good(&rig, &["tenant", "show", "a"]));
    drop(programs.map(Program::end));
}

#[test]
fn two_groups_take_exclusive_turns() {
    let rig = grouped(&[("a", "g"), ("b", "h")]);
    let _daemon = Daemon::start(&rig);
    let programs = [count(&rig, "a"), count(&rig, "b")];
    until_together(&rig, &["a", "b"]);
    let [one, other] = together(&rig, programs.each_ref());
    assert!(one[0].server != other[0].server && other[0].server != 0, "each group has a server of its own");
    // A turn has four kernels, and its last kernel may overlap with the first kernel of the next turn.
    let both = concurrent(&one, &other);
    assert!(both < one.len() / 2, "{both} of {} kernels", one.len());
    drop(programs.map(Program::end));
}

#[test]
fn client_of_another_daemon_has_exclusive_turns() {
    let rig = grouped(&[("a", "g"), ("b", "g")]);
    let _daemon = Daemon::start(&rig);
    let pipes = rig.folder.path().join("own");
    std::fs::create_dir(&pipes).expect("a folder");
    let mut own = rig.command(MPS, "plain").env("CUDA_MPS_PIPE_DIRECTORY", &pipes).arg("-f").spawn().expect("starts");
    awaited("its pipe is there", || pipes.join("control").exists().then_some(()));
    let client = count(&rig, "a");
    let socket = json(&rig, &["tenant", "show", "b"])["socket"].as_str().expect("a path").to_owned();
    let mut command = rig.command(support::PROGRAM, "shim");
    command.env("CUDA_MPS_PIPE_DIRECTORY", &pipes).env(cuda_protocol::SOCKET_VARIABLE, socket);
    let liar = Program::start(command.args(["count", "--kernel-us", "1000"]));
    let pid = liar.child.id();
    until(&rig, "b", "it is not believed", |b| b["group_state"]["not_clients"][0]["pid"] == pid);
    let [one, other] = together(&rig, [&client, &liar]);
    assert_ne!(other[0].server, 0, "it is a client of some server");
    let both = concurrent(&one, &other);
    assert!(both < one.len() / 2, "{both} of {} kernels", one.len());
    let text = good(&rig, &["tenant", "show", "b"]);
    assert!(text.contains(&format!("turns until the next start of cuda-program ({pid}): no MPS client")), "{text}");
    drop([client, liar].map(Program::end));
    own.kill().expect("killed");
    own.wait().expect("ends");
}

#[test]
fn killed_mps_is_restarted_and_its_programs_are_named() {
    let rig = grouped(&[("a", "g"), ("b", "g"), ("c", "h")]);
    let _daemon = Daemon::start(&rig);
    let mut other = count(&rig, "c");
    let mut old = String::new();
    for round in 1..3 {
        let programs = [count(&rig, "a"), count(&rig, "b")];
        until_together(&rig, &["a", "b"]);
        let pids = programs.each_ref().map(|program| program.child.id());
        let of_server = server(&rig, "g", &old);
        // First kill only the server. Then kill the control daemon, whose server exits with it.
        let killed = if round == 1 { of_server.clone() } else { control(&rig, "g") };
        signal("-KILL", &killed);
        programs.into_iter().for_each(lost);
        let texts = events(&rig, "mps_lost", round);
        let text = texts.iter().find(|text| text.contains(&format!("({})", pids[0]))).expect("its programs are named");
        assert!(
            text.starts_with("share group `g`: the MPS ") && text.contains(&format!("`cuda-program` ({})", pids[1]))
        );
        old = of_server;
    }
    events(&rig, "mps_started", 1);
    let again = [count(&rig, "a"), count(&rig, "b")];
    until_together(&rig, &["a", "b", "c"]);
    server(&rig, "g", &old);
    works(&mut other);
    drop(again.map(Program::end));
    other.end();
}

#[test]
fn fault_ends_the_clients_of_its_group_only() {
    let rig = grouped(&[("a", "g"), ("b", "g"), ("c", "h")]);
    let _daemon = Daemon::start(&rig);
    let (member, mut other) = (count(&rig, "b"), count(&rig, "c"));
    // This program does not detect the fault, so the server stays faulty until the program exits.
    let mut holds = run(&rig, "b", &[], &["hold", "--mib", "2"]);
    assert_eq!(holds.line(), "holds");
    let mut faulty = run(&rig, "a", &[], &["fault"]);
    assert_eq!(faulty.line(), "ready");
    until_together(&rig, &["b", "c"]);
    let pid = member.child.id();
    faulty.say("now");
    assert!(faulty.line().contains("700"), "CUDA_ERROR_ILLEGAL_ADDRESS");
    lost(member);
    let text = events(&rig, "mps_lost", 1).join("\n");
    assert!(text.contains("share group `g`: a program of the group caused a fault"), "{text}");
    assert!(text.contains(&format!("`cuda-program` ({pid})")), "{text}");
    works(&mut other);
    drop(faulty.child.wait());
    let refused = run(&rig, "b", &[], &["look"]);
    lost(refused);
    holds.kill();
    // The server accepts clients again when all of its clients have exited.
    let again = count(&rig, "b");
    until_together(&rig, &["b"]);
    drop([again, other].map(Program::end));
}

#[test]
fn killed_and_stopped_members_cost_others_nothing() {
    let rig = grouped(&[("a", "g"), ("b", "g"), ("c", "h")]);
    let _daemon = Daemon::start(&rig);
    let (mut member, mut other) = (count(&rig, "b"), count(&rig, "c"));
    let killed = count(&rig, "a");
    until_together(&rig, &["a", "b", "c"]);
    let pids = [&member, &other].map(|program| program.child.id());
    killed.kill();
    works(&mut member);
    works(&mut other);
    let stopped = count(&rig, "a");
    until_together(&rig, &["a", "b", "c"]);
    signal("-STOP", &stopped.child.id().to_string());
    works(&mut member);
    works(&mut other);
    signal("-CONT", &stopped.child.id().to_string());
    stopped.end();
    assert!(json(&rig, &["events", "--kind", "mps_lost"])["events"].as_array().expect("a list").is_empty());
    assert_eq!(pids, [&member, &other].map(|program| program.child.id()));
    drop([member, other].map(Program::end));
}

#[test]
fn group_without_mps_takes_turns_and_says_why() {
    let rig = rig(|rig| {
        let member = |name| tenant(name, "fake", "share_group = \"g\"\n");
        card(rig, "fake", "cuda.mps_control = \"/nonexistent/mps\"\n") + &member("a") + &member("b")
    });
    let _daemon = Daemon::start(&rig);
    let mut programs = [count(&rig, "a"), count(&rig, "b")];
    programs.iter_mut().for_each(works);
    until(&rig, "a", "the reason is known", |a| a["group_state"]["mps"] == "unavailable");
    let text = good(&rig, &["tenant", "show", "a"]);
    assert!(text.contains("g, auto: turns: /nonexistent/mps does not exist: install"), "{text}");
    assert_eq!(group_state(&rig, "b")["takes_part"], false);
    drop(programs.map(Program::end));
}

#[test]
fn server_outlives_cards_owner_and_ends_with_its_group() {
    let rig = grouped(&[("a", "g"), ("b", "g")]);
    let daemon = Daemon::start(&rig);
    let mut programs = [count(&rig, "a"), count(&rig, "b")];
    until_together(&rig, &["a", "b"]);
    let (before, process) = (server(&rig, "g", ""), control(&rig, "g"));
    signal("-KILL", &daemon.owners()[0]);
    events(&rig, "owner_started", 1);
    until_together(&rig, &["a", "b"]);
    programs.iter_mut().for_each(works);
    assert_eq!((server(&rig, "g", ""), control(&rig, "g")), (before, process.clone()));
    for name in ["a", "b"] {
        good(&rig, &["tenant", "set", name, "--share-group", ""]);
    }
    programs.iter_mut().for_each(works);
    assert!(runs(&process), "it serves its clients until they end");
    drop(programs.map(Program::end));
    awaited("it has ended", || (!folder(&rig, "g").join("control.pid").exists()).then_some(()));
    awaited("so has its process", || (!runs(&process)).then_some(()));
}

#[test]
fn fake_server_refuses_more_clients_than_its_limit() {
    let rig = Rig::new(64);
    let pipes = rig.folder.path().join("own");
    std::fs::create_dir(&pipes).expect("a folder");
    let mut control = rig.command(MPS, "plain");
    control.env("CUDA_MPS_PIPE_DIRECTORY", &pipes).env("FAKE_MPS_CLIENTS", "1");
    let mut control = control.arg("-f").spawn().expect("starts");
    awaited("its pipe is there", || pipes.join("control").exists().then_some(()));
    let program = || {
        let mut command = rig.command(support::PROGRAM, "plain");
        command.env("CUDA_MPS_PIPE_DIRECTORY", &pipes).args(["hold", "--mib", "2"]);
        command
    };
    let mut first = Program::start(&mut program());
    assert_eq!(first.line(), "holds");
    let second = program().output().expect("starts");
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(text.contains("808"), "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED: {text}");
    first.end();
    control.kill().expect("killed");
    control.wait().expect("ends");
}
