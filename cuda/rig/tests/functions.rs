//! Tests that the CUDA devices of VMs survive restarts of their daemon. `mediatord`, the owner and the workers are
//! separate processes on the fake driver; this process acts as the guest's driver.

mod support;

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::Duration;

use cuda_ring::{BlobKind, control, state};
use rig::service_manager::ServiceManager;
use rustix::process::{Pid, Signal, kill_process};
use support::daemon::{get, good, json, signal};
use support::service::{Calls, PINNED, Service, begin, is_alive, owner_of, workers};
use support::virtio::{Driver, blob, context, destroy, doorbell, identify, map, unref, until, wait};

/// Checks that a program continues with its worker, and that its pending wait completes. Then begins another wait.
fn check(service: &Service, driver: &mut Driver, worker: i32) {
    assert_eq!(driver.status(), 0xf, "{}", service.log());
    assert_eq!(workers(&service.rig), [worker], "{}", service.log());
    assert_eq!(driver.load(control::STATE), state::READY);
    // A wait that began before the restart completes when its word has the awaited value.
    assert_eq!(driver.answered(), None);
    driver.store(PINNED, 1);
    assert_eq!(driver.answer(), (5, 0x1100));
    driver.store(PINNED, 0);
    driver.execute(&doorbell(1));
    driver.post(5, &wait(1, 1, (2, 0), 1));
    let shown = json(&service.rig, &["vm", "show", "vm"]);
    assert_eq!(shown["state"], "connected");
    assert_eq!(shown["programs"].as_array().expect("a list").len(), 1, "{shown}");
}

#[test]
fn guest_program_and_owner_continue_through_upgrades() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    driver.post(5, &wait(1, 1, (2, 0), 1));
    let [worker] = workers(&service.rig)[..] else { panic!("one worker") };
    // Run a program on the host as a tenant of the same owner.
    let mut program = support::daemon::run(&service.rig, "a", &[], &["live", "--mib", "8"]);
    program.steps(3);
    let owner = owner_of(&service);
    let mut next = service.upgrade();
    for _ in 0..2 {
        check(&service, &mut driver, worker);
        // The owner was not restarted, so its programs stay connected.
        assert_eq!(json(&service.rig, &["card", "show", "fake"])["owner_restarts"], 0);
        assert!(is_alive(owner), "{}", service.log());
        program.steps(3);
        good(&service.rig, &["tenant", "set", "a", "--weight", "7"]);
        let info = json(&service.rig, &["daemon", "upgrade"]);
        let ended = next;
        until("the previous daemon has exited", || !is_alive(ended));
        next = i32::try_from(info["pid"].as_i64().expect("a number")).expect("a process");
        assert_eq!(json(&service.rig, &["tenant", "show", "a"])["time"]["weight"], 7);
    }
    check(&service, &mut driver, worker);
    program.grow();
    assert_eq!(program.end(), "held 6");
    // The program's worker exits with it, and no state of a removed VM remains.
    driver.store(PINNED, 1);
    assert_eq!(driver.answer().0, 5);
    driver.execute(&destroy(1));
    (16..19).for_each(|resource| driver.execute(&unref(resource)));
    until("the worker has exited", || !is_alive(worker));
    begin(&mut driver, 2);
    good(&service.rig, &["vm", "remove", "vm"]);
    assert!(workers(&service.rig).is_empty());
    kill_process(Pid::from_raw(next).expect("a process"), Signal::TERM).expect("signalled");
    until("the last daemon has exited", || !is_alive(next));
}

#[test]
fn guest_program_continues_after_kills_of_the_daemon() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    driver.post(5, &wait(1, 1, (2, 0), 1));
    let [worker] = workers(&service.rig)[..] else { panic!("one worker") };
    for death in 1..=3 {
        service.until_kept();
        service.kill();
        // No daemon is running, so the next one reads this command.
        driver.offer(6, &doorbell(1));
        service.restart();
        assert_eq!(driver.answer(), (6, 0x1100), "{}", service.log());
        check(&service, &mut driver, worker);
        let shown = json(&service.rig, &["vm", "show", "vm"]);
        assert_eq!(shown["transport"]["daemon_deaths_survived"], death);
        assert!(service.log().contains("and its device continues"));
    }
    driver.store(PINNED, 1);
    assert_eq!(driver.answer().0, 5);
    begin(&mut driver, 2);
    driver.execute(&destroy(1));
    until("the worker has exited", || !is_alive(worker));
    drop(driver);
    until("the guest's programs have exited with their VMM", || workers(&service.rig).is_empty());
}

#[test]
fn worker_with_a_user_of_its_own_finds_the_next_daemon() {
    // Only root, or a daemon with the privileges from the package's drop-in, can start processes of other users.
    if !rustix::process::geteuid().is_root() {
        return;
    }
    const USER: u32 = 54_321;
    let mut service = Service::start_with(30, &format!("cuda.worker_users = [{USER}, {}]\n", USER + 1));
    let folder = service.rig.folder.path().to_owned();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711)).expect("set");
    let mut driver = service.driver();
    begin(&mut driver, 1);
    driver.post(5, &wait(1, 1, (2, 0), 1));
    let [worker] = workers(&service.rig)[..] else { panic!("one worker: {}", service.log()) };
    let user = || std::fs::metadata(format!("/proc/{worker}")).expect("alive").uid();
    assert_eq!(user(), USER);
    for _ in 0..2 {
        service.until_kept();
        service.kill();
        service.restart();
        check(&service, &mut driver, worker);
    }
    let next = service.upgrade();
    check(&service, &mut driver, worker);
    // The worker of the VM's next program runs as the same user.
    begin(&mut driver, 2);
    let users: Vec<_> = workers(&service.rig)
        .into_iter()
        .map(|pid| std::fs::metadata(format!("/proc/{pid}")).expect("alive").uid())
        .collect();
    assert_eq!(users, [USER, USER]);
    drop(driver);
    until("the guest's programs have exited with their VMM", || workers(&service.rig).is_empty());
    kill_process(Pid::from_raw(next).expect("a process"), Signal::TERM).expect("signalled");
    until("the last daemon has exited", || !is_alive(next));
}

#[test]
fn kills_at_any_time_lose_no_command_and_answer_none_twice() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    let [worker] = workers(&service.rig)[..] else { panic!("one worker") };
    for round in 0..12u64 {
        service.until_kept();
        let delay = Duration::from_micros(500 + 1_733 * round);
        let pid = Pid::from_child(&service.daemon);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            kill_process(pid, Signal::KILL).expect("killed");
        });
        // Queue commands that change the state while the daemon is killed. Do not access registers, because the reply
        // to an access may be lost.
        let mut sent = 0u16;
        let mut answers = Vec::new();
        let commands = [context(2), blob(2, 40, (0, BlobKind::Control.number()), control::BYTES), map(40, 512 << 20)];
        for command in commands.into_iter().chain([unref(40), destroy(2), doorbell(1)]) {
            driver.offer(20 + sent, &command);
            sent += 1;
        }
        if round % 2 == 0 {
            driver.post(30, &doorbell(1));
            sent += 1;
        }
        killer.join().expect("no panic");
        service.daemon.wait().expect("ended");
        service.restart();
        driver.status();
        // Ring the doorbell, because the daemon may already have read the queue.
        driver.post(31, &doorbell(1));
        sent += 1;
        while answers.len() < usize::from(sent) {
            answers.push(driver.answer());
        }
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(driver.answered(), None, "round {round}: a command got two replies");
        assert!(answers.iter().all(|(_, kind)| (0x1100..0x1200).contains(kind)), "round {round}: {answers:x?}");
        let mut slots: Vec<_> = answers.iter().map(|(slot, _)| *slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), usize::from(sent), "round {round}: {answers:x?}");
        assert_eq!(driver.load(control::STATE), state::READY, "{}", service.log());
        until("only the first program has a worker", || workers(&service.rig) == [worker]);
    }
}

#[test]
fn worker_without_a_daemon_ends_after_its_time() {
    let mut service = Service::start(2);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    begin(&mut driver, 2);
    assert_eq!(workers(&service.rig).len(), 2);
    service.kill();
    until("workers exit without a daemon", || workers(&service.rig).is_empty());
    // The next daemon detects that the workers have exited.
    service.restart();
    until("the program is notified", || driver.load(control::STATE) == state::LOST);
    driver.status();
}

#[test]
fn worker_that_the_next_daemon_does_not_know_ends_at_once() {
    let mut service = Service::start(3600);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    // Without the journals, the next daemon cannot restore the device.
    service.kill();
    let notify = service.rig.folder.path().join("second");
    service.manager = ServiceManager::new(&notify).expect("a service manager");
    drop(driver);
    service.restart();
    until("the worker is dismissed", || workers(&service.rig).is_empty());
}

#[test]
fn guest_program_is_shown_with_its_worker() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    driver.execute(&identify(1, 4321));
    let [worker] = workers(&service.rig)[..] else { panic!("one worker") };
    let check = |service: &Service, pid: u32| {
        // A new daemon shows the programs once the device has been restored.
        let mut shown = serde_json::Value::Null;
        until("the VM's program", || {
            shown = json(&service.rig, &["vm", "show", "vm"]);
            shown["programs"].as_array().is_some_and(|programs| !programs.is_empty())
        });
        let program = &shown["programs"][0];
        assert_eq!((&program["pid"], &program["worker"]), (&pid.into(), &worker.into()), "{shown} {}", service.log());
        let is_shown = |shown: &serde_json::Value| {
            let programs = shown["programs"].as_array().expect("a list").clone();
            let found = programs.iter().find(|program| program["pid"] == worker);
            found.is_some_and(|program| program["guest"] == serde_json::json!({ "name": "prog", "pid": pid }))
        };
        until("the tenant's program", || is_shown(&json(&service.rig, &["tenant", "show", "vm"])));
        let text = good(&service.rig, &["tenant", "show", "vm"]);
        assert!(text.contains(&format!("prog ({pid} in the guest, worker {worker})")), "{text}");
        let list = get(&service.rig, "/v1/tenants");
        assert!(list.contains(&format!("\"guest\":{{\"name\":\"prog\",\"pid\":{pid}}}")), "{list}");
    };
    check(&service, 4321);
    // The guest chooses the process ID, and may change it.
    driver.execute(&identify(1, 7));
    check(&service, 7);
    service.until_kept();
    service.kill();
    service.restart();
    driver.status();
    check(&service, 7);
}

#[test]
fn part_of_a_vm_changes_under_its_program() {
    let service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    good(&service.rig, &["sched", "set-vm", "vm", "--weight", "250"]);
    good(&service.rig, &["memory", "set-quota", "vm", "16"]);
    let shown = json(&service.rig, &["tenant", "show", "vm"]);
    assert_eq!((&shown["time"]["weight"], &shown["memory"]["quota_mib"]), (&250.into(), &16.into()), "{shown}");
    good(&service.rig, &["tenant", "set", "vm", "--weight", "50"]);
    let shown = json(&service.rig, &["sched", "show", "fake"]).to_string();
    assert!(shown.contains("\"weight\":50"), "{shown}");
    assert!(support::daemon::bad(&service.rig, 2, &["memory", "set-quota", "vm", "15"]).contains("chunk"));
    assert!(support::daemon::bad(&service.rig, 3, &["tenant", "remove", "vm"]).contains("vm"));
    assert!(get(&service.rig, "/v1/events").contains("weight"));
    assert_eq!(driver.load(control::STATE), state::READY);
    // A restarted owner also gets the settings.
    let owner = json(&service.rig, &["card", "show", "fake"])["owner_restarts"].clone();
    let pid = owner_of(&service);
    signal("-KILL", &pid.to_string());
    until("another owner", || json(&service.rig, &["card", "show", "fake"])["owner_restarts"] != owner);
    until("the new owner's settings", || json(&service.rig, &["tenant", "show", "vm"])["time"]["weight"] == 50);
}

#[test]
fn memory_size_of_a_vm_changes_under_its_program() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    let [worker] = workers(&service.rig)[..] else { panic!("one worker") };
    let sizes = |service: &Service| {
        let [vm, tenant] = ["vm", "tenant"].map(|kind| json(&service.rig, &[kind, "show", "vm"])["vram_mib"].clone());
        // A new owner describes its card shortly after its start.
        let show = || support::daemon::ctl(&service.rig, &["--json", "memory", "show", "fake"]);
        until("the owner describes its card", || show().status.success());
        let memory = json(&service.rig, &["memory", "show", "fake"]);
        let shown = memory["vms"].as_array().expect("a list").iter().find(|shown| shown["vm"] == "vm");
        let seen = shown.expect("the VM")["advertised_bytes"].as_u64().expect("bytes") >> 20;
        assert_eq!((&vm, &tenant), (&seen.into(), &seen.into()), "{memory}");
        seen
    };
    assert_eq!(sizes(&service), 32);
    good(&service.rig, &["tenant", "set", "vm", "--vram-mib", "16"]);
    assert_eq!(sizes(&service), 16);
    assert!(support::daemon::bad(&service.rig, 2, &["tenant", "set", "vm", "--vram-mib", "15"]).contains("chunk"));
    // The card has 64 MiB of VRAM and 1,152 MiB of host memory.
    let text = support::daemon::bad(&service.rig, 4, &["tenant", "set", "vm", "--vram-mib", "1218"]);
    assert!(text.contains("vram_mib: 1218 MiB, expected at most 1216"), "{text}");
    assert_eq!(sizes(&service), 16);
    let file = service.rig.folder.path().join("desired.toml");
    std::fs::write(&file, "[[vm]]\nname = \"vm\"\nvram_mib = 24\nmemory.quota_mib = 8\n").expect("written");
    let path = file.display().to_string();
    good(&service.rig, &["apply", "-f", &path]);
    assert_eq!(sizes(&service), 24);
    assert_eq!(json(&service.rig, &["tenant", "show", "vm"])["memory"]["quota_mib"], 8);
    std::fs::write(&file, "[[vm]]\nname = \"vm\"\ncuda.window_mib = 2048\n").expect("written");
    support::daemon::bad(&service.rig, 4, &["apply", "-f", &path]);
    assert!(get(&service.rig, "/v1/events").contains("vram_mib"));
    // The size survives restarts of the owner and the daemon, and an upgrade.
    let pid = owner_of(&service);
    signal("-KILL", &pid.to_string());
    until("another owner", || json(&service.rig, &["card", "show", "fake"])["owner_restarts"] == 1);
    until("the new owner has the tenants", || json(&service.rig, &["tenant", "show", "vm"])["served"] == true);
    assert_eq!(sizes(&service), 24);
    service.until_kept();
    service.kill();
    service.restart();
    driver.status();
    assert_eq!(sizes(&service), 24);
    let next = service.upgrade();
    assert_eq!(sizes(&service), 24);
    assert_eq!(workers(&service.rig), [worker], "{}", service.log());
    kill_process(Pid::from_raw(next).expect("a process"), Signal::TERM).expect("signalled");
    until("the last daemon has exited", || !is_alive(next));
}

#[test]
fn windows_of_vms_count_as_host_memory_of_the_card() {
    let service = Service::start(30);
    let memory = || {
        let shown = json(&service.rig, &["memory", "show", "fake"]);
        ["host_budget_bytes", "host_used_bytes", "windows_bytes"].map(|key| shown[key].as_u64().expect("bytes") >> 20)
    };
    assert_eq!(memory(), [1152, 1024, 1024]);
    let second = ["vm", "add", "second", "--card", "fake", "--vram-mib", "8", "--cuda", "--cuda-window-mib", "1024"];
    let text = support::daemon::bad(&service.rig, 4, &second);
    assert!(text.contains("cuda.window_mib: 1024 MiB, expected at most 128: the window is host memory"), "{text}");
    let text = support::daemon::bad(&service.rig, 2, &["memory", "set", "fake", "--host-mib", "1022"]);
    assert!(text.contains("memory.host_mib: 1022 MiB, expected at least 1024 for windows of VMs"), "{text}");
    // Tenants share the host memory that no window occupies.
    let mut program = support::daemon::run(&service.rig, "a", &[], &["fill", "--step-mib", "2"]);
    assert_eq!(program.line(), "64", "its own limit");
    program.child.wait().expect("ends");
    good(&service.rig, &["tenant", "set", "a", "--vram-mib", "1000"]);
    let mut program = support::daemon::run(&service.rig, "a", &[], &["fill", "--step-mib", "2"]);
    assert_eq!(program.line(), "192", "64 MiB of the card, and 128 MiB of host memory");
    program.child.wait().expect("ends");
    let shown = get(&service.rig, "/metrics");
    assert!(shown.contains("gpu_mediator_host_memory_windows_bytes{card=\"fake\"} 1073741824"), "{shown}");
    good(&service.rig, &["vm", "remove", "vm"]);
    assert_eq!(memory(), [1152, 0, 0]);
    good(&service.rig, &second);
    assert_eq!(memory(), [1152, 1024, 1024]);
}

#[test]
fn guest_program_continues_in_new_workers_on_request() {
    let mut service = Service::start(30);
    let mut driver = service.driver();
    begin(&mut driver, 1);
    let (mut calls, address) = Calls::start(&mut driver, 77);
    driver.post(5, &wait(1, 1, (2, 0), 1));
    let [mut worker] = workers(&service.rig)[..] else { panic!("one worker") };
    for _ in 0..3 {
        let done = json(&service.rig, &["vm", "restart-workers", "vm"]);
        let program = &done["programs"][0];
        assert!(program["pause_ms"].is_u64() && program["why"].is_null(), "{done} {}", service.log());
        let [next] = workers(&service.rig)[..] else { panic!("one worker: {}", service.log()) };
        assert_ne!(next, worker);
        worker = next;
        check(&service, &mut driver, worker);
        calls.check(&mut driver, address, 77);
    }
    // The reply names the obstacle, and the program continues in its worker.
    calls.call(&mut driver, "cuMemAddressReserve", &[2 << 20, 0, 0, 0]);
    let refused = support::daemon::ctl(&service.rig, &["vm", "restart-workers", "vm"]);
    let text = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{text}");
    assert!(text.contains("it has an object of cuMemAddressReserve, which cannot be created again"), "{text}");
    check(&service, &mut driver, worker);
    calls.check(&mut driver, address, 77);
    let none = support::daemon::bad(&service.rig, 4, &["vm", "restart-workers", "vm", "--pid", "1"]);
    assert!(none.contains("no program with process ID 1 in the guest uses CUDA"), "{none}");
    // The journal contains the new worker, so the next daemon finds it.
    service.until_kept();
    service.kill();
    service.restart();
    check(&service, &mut driver, worker);
    calls.check(&mut driver, address, 77);
    let next = service.upgrade();
    check(&service, &mut driver, worker);
    calls.check(&mut driver, address, 77);
    driver.store(PINNED, 1);
    assert_eq!(driver.answer().0, 5);
    driver.execute(&destroy(1));
    until("the worker has exited", || !is_alive(worker));
    kill_process(Pid::from_raw(next).expect("a process"), Signal::TERM).expect("signalled");
    until("the last daemon has exited", || !is_alive(next));
}
