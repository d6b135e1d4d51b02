//! Tests VMs whose programs continue on another card. `mediatord`, the owners and the workers are separate processes on
//! the fake driver; this process acts as the guest's driver.

mod support;

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::Rig;
use support::daemon::{bad, card, ctl, ctl_command, get, good, json, owner_pids, tenant};
use support::service::{Calls, Service, begin, is_alive, with_window, worker, workers};
use support::virtio::{Driver, destroy, until};

/// A guest program, and its memory.
struct Program {
    calls: Calls,
    address: u64,
    word: u64,
}

impl Program {
    fn start(driver: &mut Driver, id: u32, bytes: u64) -> Self {
        begin(driver, id);
        let word = 70 + u64::from(id);
        let (calls, address) = Calls::start_with(driver, id, bytes, word);
        Self { calls, address, word }
    }

    /// Checks that the program can access its memory through a worker.
    fn check(&mut self, driver: &mut Driver) {
        self.calls.check(driver, self.address, self.word);
    }
}

fn vm(name: &str, more: &str) -> String {
    format!("[[vm]]\nname = \"{name}\"\ncard = \"one\"\nvram_mib = 32\ncuda = {{ window_mib = 1024 }}\n{more}")
}

fn cuda_card(rig: &Rig, name: &str, number: u64, more: &str) -> String {
    let worker = worker(rig, 3);
    let keys = format!("cuda.device = \"{number}\"\ncuda.worker = {worker:?}\ncuda.orphan_timeout_s = 30\n{more}");
    with_window(&card(rig, name, &keys))
}

/// Starts a daemon with two cards, a VM and a tenant on the first one, and a tenant on the second one.
fn service() -> Service {
    Service::with(3, |rig| {
        let cards = cuda_card(rig, "one", 0, "") + &cuda_card(rig, "two", 1, "");
        cards + &tenant("a", "one", "") + &tenant("c", "two", "") + &vm("vm", "")
    })
}

fn show(service: &Service, name: &str) -> Value {
    json(&service.rig, &["vm", "show", name])
}

/// Returns the cards whose owners list the VM.
fn owners_of(service: &Service) -> Vec<&'static str> {
    let lists = |card: &&&str| {
        // A new owner describes its card soon after its start.
        let mut shown = Value::Null;
        until("the owner describes its card", || {
            let output = ctl(&service.rig, &["--json", "memory", "show", card]);
            shown = serde_json::from_slice(&output.stdout).unwrap_or_default();
            output.status.success()
        });
        shown["vms"].as_array().expect("a list").iter().any(|tenant| tenant["vm"] == "vm")
    };
    ["one", "two"].iter().filter(lists).copied().collect()
}

/// Returns the process IDs of the owners of both cards, once both owners run.
fn owners(service: &Service) -> Vec<i32> {
    let mut owners = Vec::new();
    until("both owners run", || {
        owners = owner_pids(service.daemon.id());
        owners.len() == 2
    });
    owners
}

fn kill(pid: i32) {
    let _ = kill_process(Pid::from_raw(pid).expect("a process"), Signal::KILL);
}

#[test]
fn programs_continue_on_the_other_card_with_their_tenant() {
    let mut service = service();
    let mut driver = service.driver();
    let mut programs = [1, 2].map(|id| Program::start(&mut driver, id, 4096));
    let neighbours = ["a", "c"].map(|name| {
        let mut neighbour = support::daemon::run(&service.rig, name, &[], &["live", "--mib", "8"]);
        neighbour.steps(2);
        neighbour
    });
    good(&service.rig, &["tenant", "set", "vm", "--weight", "250"]);
    good(&service.rig, &["memory", "set-quota", "vm", "16"]);
    let mut before = workers(&service.rig);
    for to in ["two", "one", "two"] {
        let text = good(&service.rig, &["vm", "move", "vm", "--card", to]);
        assert!(text.contains(&format!("to {to}: 4 MiB")), "{text} {}", service.log());
        let now = workers(&service.rig);
        assert!(now.len() == 2 && now.iter().all(|pid| !before.contains(pid)), "{now:?} {before:?}");
        before = now;
        programs.iter_mut().for_each(|program| program.check(&mut driver));
        assert_eq!(owners_of(&service), [to]);
        let shown = json(&service.rig, &["tenant", "show", "vm"]);
        assert_eq!((&shown["card"], &shown["time"]["weight"]), (&to.into(), &250.into()), "{shown}");
        assert_eq!(shown["memory"]["quota_mib"], 16);
        until("both programs are shown", || {
            let shown = json(&service.rig, &["tenant", "show", "vm"]);
            let programs = shown["programs"].as_array().expect("a list").clone();
            programs.iter().filter(|program| program["guest"]["name"] == "prog").count() == 2
        });
        assert!(bad(&service.rig, 4, &["vm", "move", "vm", "--card", to]).contains("it already has that card"));
    }
    assert!(get(&service.rig, "/v1/events").contains("moved from card `one` to card `two`"));
    // The next daemon finds the programs on their card. A program that starts later uses the new card.
    let mut third = Program::start(&mut driver, 3, 4096);
    service.until_kept();
    service.kill();
    service.restart();
    assert_eq!((driver.status(), show(&service, "vm")["card"].clone()), (0xf, "two".into()));
    programs.iter_mut().chain([&mut third]).for_each(|program| program.check(&mut driver));
    assert_eq!(owners_of(&service), ["two"]);
    let next = service.upgrade();
    programs.iter_mut().for_each(|program| program.check(&mut driver));
    good(&service.rig, &["vm", "move", "vm", "--card", "one"]);
    programs.iter_mut().for_each(|program| program.check(&mut driver));
    for mut neighbour in neighbours {
        neighbour.steps(2);
        assert_eq!(neighbour.end(), "held 4");
    }
    good(&service.rig, &["vm", "remove", "vm"]);
    assert!(workers(&service.rig).is_empty());
    assert!(owners_of(&service).is_empty());
    assert!(!service.rig.folder.path().join("tenants/vm").exists());
    kill_process(Pid::from_raw(next).expect("a process"), Signal::TERM).expect("signalled");
    until("the last daemon has exited", || !is_alive(next));
}

#[test]
fn vm_that_cannot_move_is_refused_by_name_and_continues() {
    let service = Service::with(3, |rig| {
        let small = cuda_card(rig, "small", 2, "").replace("memory.host_mib = 1152\n", "memory.host_mib = 512\n");
        let chunks = cuda_card(rig, "chunks", 2, "").replace("cuda.chunk_mib = 2\n", "cuda.chunk_mib = 4\n");
        let soft = "[[card]]\nname = \"soft\"\nkind = \"simgpu\"\nvram_mib = 64\n";
        let cards = cuda_card(rig, "one", 0, "") + &cuda_card(rig, "two", 1, "") + &small + &chunks + soft;
        let old = "[[vm]]\nname = \"old\"\ncard = \"soft\"\nvram_mib = 16\n";
        cards + &tenant("f", "two", "memory.guarantee_mib = 56\n") + &vm("vm", "") + old
    });
    let mut driver = service.driver();
    let mut program = Program::start(&mut driver, 1, 4096);
    let [worker] = workers(&service.rig)[..] else { panic!("one worker: {}", service.log()) };
    let mut refused = |code: i32, name: &str, to: &str, why: &str| {
        let text = bad(&service.rig, code, &["vm", "move", name, "--card", to]);
        assert!(text.contains(why), "{name} {to}: {text}");
        program.check(&mut driver);
        assert_eq!(workers(&service.rig), [worker], "{to}: {}", service.log());
        assert_eq!(show(&service, "vm")["card"], "one");
    };
    refused(4, "vm", "one", "it already has that card");
    refused(3, "vm", "none", "there is no card `none`");
    refused(3, "other", "two", "there is no VM `other`");
    refused(4, "vm", "soft", "the card is not of kind `cuda`");
    refused(4, "vm", "small", "cuda.window_mib: 1024 MiB, expected at most 512");
    refused(4, "vm", "chunks", "its `cuda.chunk_mib` is 4, expected 2");
    refused(4, "old", "two", "is of kind = \"cuda\"");
    let text = bad(&service.rig, 4, &["tenant", "move", "vm", "--card", "two"]);
    assert!(text.contains("it is a VM: `mediatorctl vm move` moves it"), "{text}");
    // The guarantee of the other card's tenant leaves no memory for another guarantee.
    good(&service.rig, &["tenant", "set", "vm", "--guarantee-mib", "16"]);
    refused(4, "vm", "two", "memory.guarantee_mib");
    good(&service.rig, &["tenant", "set", "vm", "--guarantee-mib", "0"]);
    good(&service.rig, &["card", "drain", "two"]);
    refused(4, "vm", "two", "the card is drained");
    good(&service.rig, &["card", "undrain", "two"]);
    // An object that cannot be created again is named before anything changes.
    program.calls.call(&mut driver, "cuMemAddressReserve", &[2 << 20, 0, 0, 0]);
    let text = bad(&service.rig, 4, &["vm", "move", "vm", "--card", "two"]);
    let why = "program \"prog\": it has an object of cuMemAddressReserve, which cannot be created again";
    assert!(text.contains(why), "{text}");
    program.check(&mut driver);
    assert_eq!((workers(&service.rig), owners_of(&service)), (vec![worker], vec!["one"]), "{}", service.log());
    let report = ctl(&service.rig, &["--json", "card", "drain", "one"]);
    let report: Value = serde_json::from_slice(&report.stdout).expect("JSON");
    assert!(report["left"][0]["why"].as_str().is_some_and(|why| why.contains("cuMemAddressReserve")), "{report}");
    program.check(&mut driver);
}

#[test]
fn drained_card_moves_its_vms_with_their_programs() {
    let service = service();
    let mut driver = service.driver();
    let mut program = Program::start(&mut driver, 1, 4096);
    let report = json(&service.rig, &["card", "drain", "one"]);
    let moved = report["moved"].as_array().expect("a list").clone();
    assert_eq!((moved.len(), &moved[0]["vm"], &moved[0]["to"]), (1, &"vm".into(), &"two".into()), "{report}");
    assert!(report["left"].as_array().expect("a list").is_empty(), "{report}");
    program.check(&mut driver);
    assert_eq!(owners_of(&service), ["two"]);
}

/// A process that is killed during a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    OlderOwner,
    LaterOwner,
    Workers,
    NewWorkers,
    Daemon,
}

#[test]
fn killed_process_during_a_move_leaves_one_card() {
    use Victim::*;
    let mut service = service();
    for (round, victim) in
        [OlderOwner, LaterOwner, Workers, NewWorkers, Daemon].into_iter().cycle().take(20).enumerate()
    {
        let mut driver = service.driver();
        let mut program = Program::start(&mut driver, 1, 12 << 20);
        let from = show(&service, "vm")["card"].as_str().expect("a name").to_owned();
        let to = if from == "one" { "two" } else { "one" };
        service.until_kept();
        let known = workers(&service.rig);
        // Kill the process at different times between the request and the end of the move.
        let delay = Duration::from_millis([5, 15, 30, 60][round % 4]);
        let mut command = ctl_command(&service.rig, &["vm", "move", "vm", "--card", to]);
        let mut moving = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
        std::thread::sleep(delay);
        match victim {
            OlderOwner => kill(owners(&service)[0]),
            LaterOwner => kill(owners(&service)[1]),
            Workers => known.iter().for_each(|pid| kill(*pid)),
            NewWorkers => workers(&service.rig).into_iter().filter(|pid| !known.contains(pid)).for_each(kill),
            Daemon => {
                service.kill();
                // The service manager keeps the socket, so the command may wait for the next daemon.
                service.restart();
                driver.status();
            }
        }
        moving.wait().expect("ended");
        owners(&service);
        // The program continues on the card that the daemon names, or has ended.
        let card = show(&service, "vm")["card"].as_str().expect("a name").to_owned();
        until("one owner has the VM", || owners_of(&service) == [card.as_str()]);
        until("the program has a worker, or has ended", || {
            program.calls.is_lost(&driver) || workers(&service.rig).len() == 1
        });
        let is_known = |service: &Service| json(&service.rig, &["tenant", "show", "vm"])["served"] == true;
        until("the owner serves the VM", || is_known(&service));
        if !program.calls.is_lost(&driver) && !matches!(victim, Workers | NewWorkers) {
            program.check(&mut driver);
        }
        if matches!(victim, OlderOwner | LaterOwner) {
            assert!(!program.calls.is_lost(&driver), "round {round}, {victim:?}: {}", service.log());
        }
        driver.execute(&destroy(1));
        drop(driver);
        until("no worker is left", || workers(&service.rig).is_empty());
        until("no memory is left", || {
            let shown = json(&service.rig, &["memory", "show", &card]);
            let vms = shown["vms"].as_array().expect("a list").clone();
            vms.iter().find(|tenant| tenant["vm"] == "vm").is_some_and(|tenant| tenant["on_card_bytes"] == 0)
        });
    }
}
