//! Tests programs with the library and the real owner on the fake driver. All are real processes.

mod support;

use support::{Program, Rig, chunks, describe, owner, settled};

/// Returns two tenants, each with the arguments of a program that uses the given amount of memory in MiB. The second
/// program maps its memory itself.
fn mapped_by([first, second]: [&str; 2]) -> [(&str, Vec<&str>); 2] {
    [("a", vec!["live", "--mib", first]), ("b", vec!["live", "--mib", second, "--own"])]
}

#[test]
fn killed_owner_is_replaced_while_programs_run() {
    let rig = Rig::new(256);
    let first = owner(&rig, 64, &[]);
    let mut programs = mapped_by(["16", "16"]).map(|(tenant, arguments)| rig.program(tenant, &arguments));
    for program in &mut programs {
        program.grow();
    }
    first.kill();
    for program in &mut programs {
        program.steps(20);
    }
    let second = owner(&rig, 64, &[]);
    for program in &mut programs {
        program.grow();
        program.steps(20);
    }
    let view = describe(second);
    for tenant in [0, 1] {
        assert!(chunks(&view, tenant) >= 12, "its 24 MiB are accounted: {view}");
    }
    for program in programs {
        assert_eq!(program.end(), "held 12");
    }
    rig.until_free();
}

#[test]
fn an_allocation_waits_for_an_owner_that_restarts() {
    let rig = Rig::new(256);
    let first = owner(&rig, 64, &[]);
    let mut program = rig.program("a", &["live", "--mib", "8"]);
    program.steps(3);
    first.kill();
    program.say("more");
    // TIMEOUT: the program requests unavailable chunks within one step, and then only waits.
    std::thread::sleep(std::time::Duration::from_millis(2 * cuda_protocol::RECONNECT_MS));
    let second = owner(&rig, 64, &[]);
    while program.steps(1) < 6 {}
    assert!(chunks(&describe(second), 0) >= 6);
    assert_eq!(program.end(), "held 6");
}

#[test]
fn a_program_that_is_not_alone_runs_ahead_by_its_bound_only() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 64, &[]);
    let mut other = rig.program("a", &["hold", "--mib", "2"]);
    assert_eq!(other.line(), "holds");
    for _ in 0..3 {
        // The program submits work for 200 ms, and reports the total card time of its kernels.
        let busy = rig.program("b", &["busy", "--kernel-us", "1000", "--ms", "200"]).end();
        let us: u64 = busy.parse().expect("a number");
        assert!(us <= 200_000 + 30_000, "{us} us of work were submitted in 200 ms");
    }
    assert_eq!(other.end(), "held");
    describe(serving);
}

#[test]
fn a_program_that_was_alone_gives_way_to_another_one() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 64, &[]);
    // A full queue of the card holds fifty seconds of work, more than a tenant may run after an order to stop.
    let mut first = rig.program("a", &["count", "--kernel-us", "50000"]);
    let us = |program: &mut Program| {
        program.say("how much");
        program.line().parse::<u64>().expect("a number")
    };
    // The reply proves that all earlier work has completed and that the program continues.
    let alone = us(&mut first);
    assert_eq!(
        rig.program("b", &["train", "--mib", "8", "--rounds", "6"]).end().len(),
        16,
        "the checksum of another program"
    );
    assert!(us(&mut first) > alone, "the program continues");
    assert_eq!(first.end(), "counted");
    let view = settled(&rig, serving);
    assert_eq!(view["tenants"][0]["killed"], 0, "{view}");
}

#[test]
fn owners_that_are_killed_while_memory_moves_lose_nothing() {
    let rig = Rig::new(256);
    let mut serving = owner(&rig, 32, &["--quanta", "off"]);
    let mut programs = mapped_by(["24", "24"]).map(|(tenant, arguments)| rig.program(tenant, &arguments));
    for program in &mut programs {
        // Wait until the program has its initial memory. Without an owner, the program would have to wait for this
        // memory.
        program.steps(2);
    }
    for round in 0..6 {
        // The programs together use more memory than the card has, so memory moves all the time.
        programs[round % 2].grow();
        serving.kill();
        if round % 3 == 0 {
            programs[(round + 1) % 2].steps(2);
        }
        serving = owner(&rig, if round % 2 == 0 { 24 } else { 32 }, &["--quanta", "off"]);
        programs[(round + 1) % 2].steps(5);
    }
    for program in &mut programs {
        program.steps(20);
    }
    for program in programs {
        assert_eq!(program.end(), "held 18");
    }
    let view = settled(&rig, serving);
    assert_eq!((chunks(&view, 0), chunks(&view, 1)), (0, 0), "the memory of exited programs is free: {view}");
    rig.until_free();
}

#[test]
fn program_killed_during_relocation_leaves_no_memory() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 24, &["--quanta", "off"]);
    let mut other = rig.program("b", &["live", "--mib", "20"]);
    for steps in [0, 1, 2, 4, 7, 11] {
        let arguments = ["live", "--mib", "20", "--own"];
        let mut program = rig.program("a", &arguments[..3 + steps % 2]);
        program.steps(steps);
        other.steps(1);
        program.kill();
    }
    other.grow();
    assert_eq!(other.end(), "held 12");
    let view = settled(&rig, serving);
    assert_eq!((chunks(&view, 0), chunks(&view, 1)), (0, 0), "{view}");
    rig.until_free();
}

/// Makes a program increment its shared memory. Returns the new first word.
fn add(program: &mut Program) -> u64 {
    program.say("add");
    program.line().parse().expect("a number")
}

#[test]
fn processes_of_a_tenant_share_memory_and_others_cannot_open_it() {
    // Test memory in the middle of a chunk, and across several chunks.
    for kib in ["300", "5120"] {
        let rig = Rig::new(256);
        // The programs together use more memory than the card has, so unshared memory keeps moving.
        let serving = owner(&rig, 24, &["--quanta", "off"]);
        let mut others = mapped_by(["16", "16"]).map(|(tenant, arguments)| rig.program(tenant, &arguments));
        for other in &mut others {
            other.steps(2);
        }
        let mut first = rig.program("a", &["share", "--kib", kib]);
        let handle = first.line();
        assert_eq!(rig.program("b", &["attach", &handle, "--kib", kib]).end(), "1", "another tenant's");
        let mut second = rig.program("a", &["attach", &handle, "--kib", kib]);
        assert_eq!(second.line(), "100");
        for round in 0..5 {
            assert_eq!(add(&mut first), 101 + 2 * round);
            for other in &mut others {
                other.steps(2);
            }
            assert_eq!(add(&mut second), 102 + 2 * round);
        }
        let third = rig.program("a", &["attach", &handle, "--kib", kib]);
        third.kill();
        // The memory exists until the last process has closed it.
        assert_eq!(first.end(), "freed");
        assert_eq!(add(&mut second), 111);
        assert_eq!(second.end(), "closed");
        assert_eq!(rig.program("a", &["attach", &handle, "--kib", kib]).end(), "1", "the program has exited");
        for other in others {
            assert_eq!(other.end(), "held 8");
        }
        let view = settled(&rig, serving);
        assert_eq!((chunks(&view, 0), chunks(&view, 1)), (0, 0), "the memory of exited programs is free: {view}");
        rig.until_free();
    }
}

#[test]
fn shared_memory_stays_shared_under_the_next_owner() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 24, &["--quanta", "off"]);
    let mut first = rig.program("a", &["share", "--kib", "5120"]);
    let handle = first.line();
    let mut second = rig.program("a", &["attach", &handle, "--kib", "5120"]);
    assert_eq!(second.line(), "100");
    serving.kill();
    let serving = owner(&rig, 24, &["--quanta", "off"]);
    // Another tenant needs card memory. Memory that both programs share must not be moved for only one of them.
    let mut other = rig.program("b", &["live", "--mib", "30"]);
    other.steps(5);
    for round in 0..5 {
        assert_eq!(add(&mut first), 101 + 2 * round);
        other.steps(3);
        assert_eq!(add(&mut second), 102 + 2 * round);
    }
    assert_eq!(rig.program("a", &["attach", &handle, "--kib", "5120"]).end(), "1", "the previous owner's output");
    assert_eq!(first.end(), "freed");
    assert_eq!(second.end(), "closed");
    assert_eq!(other.end(), "held 15");
    let view = settled(&rig, serving);
    assert_eq!((chunks(&view, 0), chunks(&view, 1)), (0, 0), "the memory of exited programs is free: {view}");
    rig.until_free();
}

/// Starts an owner with the given arguments, and a program that fills the card and then no longer replies to the owner.
fn stalled(rig: &Rig, arguments: &[&str]) -> (Program, Program) {
    let serving = owner(rig, 32, &[&["--quanta", "off", "--suspend", "--patience-ms", "3000"], arguments].concat());
    let mut program = rig.program("a", &["stall", "--mib", "30"]);
    assert_eq!(program.line(), "holds");
    program.say("stall");
    assert_eq!(program.line(), "stalled");
    (serving, program)
}

#[test]
fn unresponsive_program_is_suspended_and_frees_memory() {
    let rig = Rig::new(256);
    let (mut serving, mut mute) = stalled(&rig, &[]);
    let mut other = rig.program("b", &["live", "--mib", "28"]);
    // Meanwhile, the other program works with host memory.
    let mut suspended = 0;
    while suspended == 0 {
        other.steps(3);
        serving.say("accounts");
        let view: serde_json::Value = serde_json::from_str(&serving.line()).expect("JSON");
        suspended = view["tenants"][0]["suspended"].as_u64().expect("a number");
    }
    assert!(mute.child.try_wait().expect("a child").is_none(), "the program still exists, for a debugger");
    assert_eq!(other.end(), "held 14");
    let view = settled(&rig, serving);
    let of = |key: &str| view["tenants"][0][key].as_u64().expect("a number");
    assert_eq!((of("suspended"), of("killed")), (1, 0), "{view}");
    assert_eq!(chunks(&view, 0), 0, "no memory of it is left: {view}");
    // The library keeps descriptors for the next owner, so the process's chunks stay allocated until the process exits.
    mute.kill();
    rig.until_free();
}

#[test]
fn a_program_that_the_driver_cannot_reach_is_killed() {
    let rig = Rig::new(256);
    let (serving, mut mute) = stalled(&rig, &[]);
    support::daemon::signal("-STOP", &mute.child.id().to_string());
    let mut other = rig.program("b", &["live", "--mib", "28"]);
    other.steps(3);
    assert!(!mute.child.wait().expect("ends").success(), "the driver waits for a process that is stopped");
    assert_eq!(other.end(), "held 14");
    let view = settled(&rig, serving);
    let of = |key: &str| view["tenants"][0][key].as_u64().expect("a number");
    assert_eq!((of("suspended"), of("killed")), (0, 1), "{view}");
    rig.until_free();
}

#[test]
fn nvml_reports_tenant_quota_and_free_memory() {
    let rig = Rig::new(256);
    let without = rig.command(support::PROGRAM, "plain").arg("nvml").output().expect("starts");
    assert_eq!(String::from_utf8_lossy(&without.stdout).trim(), "free=256 total=256");
    let finds_none = |tenant| {
        let mut program = rig.program(tenant, &["nvml"]);
        assert_eq!(program.line(), "", "no card belongs to the tenant");
        assert!(!program.child.wait().expect("ends").success());
    };
    finds_none("a");
    let serving = owner(&rig, 32, &["--quanta", "off"]);
    assert_eq!(rig.program("a", &["nvml"]).end(), "free=64 total=64");
    let mut first = rig.program("a", &["hold", "--mib", "20"]);
    assert_eq!(first.line(), "holds");
    assert_eq!(rig.program("a", &["nvml"]).end(), "free=44 total=64");
    assert_eq!(rig.program("b", &["nvml"]).end(), "free=64 total=64", "other tenants' memory does not affect it");
    finds_none("nobody");
    assert_eq!(first.end(), "held");
    describe(serving);
}

#[test]
fn nvml_shows_a_tenant_its_own_processes() {
    let rig = Rig::new(256);
    let serving = owner(&rig, 32, &["--quanta", "off"]);
    let held = |tenant| {
        let mut program = rig.program(tenant, &["hold", "--mib", "4"]);
        assert_eq!(program.line(), "holds");
        program
    };
    let mut programs = ["a", "b", "a"].map(held);
    let pid = |at: usize| programs[at].child.id();
    let list = |mut pids: Vec<u32>| {
        pids.sort_unstable();
        pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
    };
    let (of_a, of_b) = (list(vec![pid(0), pid(2)]), list(vec![pid(1)]));
    assert_eq!(rig.program("a", &["processes"]).end(), of_a);
    assert_eq!(rig.program("b", &["processes"]).end(), of_b);
    let without = rig.command(support::PROGRAM, "plain").arg("processes").output().expect("starts");
    assert!(
        String::from_utf8_lossy(&without.stdout).split(' ').count() >= 4,
        "all programs, and the owner: {without:?}"
    );
    for program in &mut programs {
        program.child.kill().expect("killed");
        program.child.wait().expect("ends");
    }
    describe(serving);
}
