//! Tests of scheduler settings, which are read and changed over the admin socket while guests use software cards.

use super::*;
use crate::fixture::{copy, guest, one_card};
use api::{AddVm, CardScheduler, SchedulerHistory, SchedulerList, VmTime};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sched::{Engine, LatencyClass, PERMILLE, PolicyKind, VgpuParams, WEIGHT_MAX};
use serde_json::json;

const SCHEDULER: &str = "/v1/cards/card0/scheduler";
/// VRAM size of each VM, in MiB.
const VM_MIB: u64 = 16;
/// Virtual address of the source buffer.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;

fn add(served: &Served, name: &str) {
    let _: api::Vm = served.client().post("/v1/vms", &AddVm::new(name, "card0", VM_MIB)).unwrap();
}

/// Returns the card's scheduler state once no work is queued or running.
fn settled(client: &Client) -> CardScheduler {
    let mut last = None;
    crate::fixture::eventually("all submissions have completed", || {
        let shown: CardScheduler = client.get(SCHEDULER).unwrap();
        let idle = shown.queued == 0 && shown.in_flight == 0;
        last = Some(shown);
        idle
    });
    last.unwrap()
}

#[test]
fn settings_of_a_card_are_changed_key_by_key() {
    let served = one_card("scheduler = { policy = \"fifo\", strikes = 5 }\n");
    let client = served.client();
    let first: CardScheduler = client.get(SCHEDULER).unwrap();
    assert_eq!((first.settings.policy, first.settings.strikes, first.window_ms), (PolicyKind::Fifo, 5, 1000));
    assert!(first.vms.is_empty());
    // Change settings before and after the mediator initializes the card. A new VM does not change the settings.
    for round in 0..2 {
        let wait_ns = 1000 + round;
        let new: CardScheduler =
            client.patch(SCHEDULER, &json!({ "policy": "credit", "band": { "wait_ns": wait_ns } })).unwrap();
        assert_eq!((new.settings.policy, new.settings.strikes), (PolicyKind::Credit, 5));
        assert_eq!((new.settings.band.wait_ns, new.settings.band.period_ns), (wait_ns, 30_000_000));
        let shown: CardScheduler = client.get(SCHEDULER).unwrap();
        assert_eq!(shown.settings, new.settings);
        add(&served, &format!("vm{round}"));
        let shown: CardScheduler = client.get(SCHEDULER).unwrap();
        assert_eq!(shown.settings, new.settings);
        assert_eq!(shown.vms.len() as u64, round + 1);
    }
    let list: SchedulerList = client.get("/v1/schedulers").unwrap();
    assert_eq!(list.schedulers.iter().map(|one| (&*one.card, one.vms.len())).collect::<Vec<_>>(), [("card0", 2)]);
}

#[test]
fn invalid_scheduler_settings_are_rejected_with_key_and_bounds() {
    let served = one_card("");
    let client = served.client();
    add(&served, "a");
    let before: CardScheduler = client.get(SCHEDULER).unwrap();
    for (patch, what) in [
        (json!({ "band": { "period_ns": 5 } }), "band.period_ns = 5 is not between 100000 and 10000000000"),
        (json!({ "policy": "fifo", "pipeline": { "alone": 0 } }), "pipeline.alone = 0 is not between 4 and 1024"),
        (json!({ "policy": "fifo", "band": { "wait": 5 } }), "band.wait: unknown field `wait`"),
        (json!({ "polcy": "fifo" }), "polcy: unknown field `polcy`, expected one of `policy`"),
        (json!({ "policy": "best" }), "policy: unknown variant `best`"),
        (json!([1]), "invalid type: sequence"),
    ] {
        let error = refused(client.patch::<CardScheduler>(SCHEDULER, &patch));
        assert_eq!(error.code, ErrorCode::Invalid, "{patch}");
        assert!(error.error.contains(what) && !error.what_to_do.is_empty(), "{patch}: {error:?}");
    }
    let after: CardScheduler = client.get(SCHEDULER).unwrap();
    assert_eq!(after.settings, before.settings);

    for (path, what) in [
        (format!("{SCHEDULER}?window_ms=99"), "window_ms = 99 is not between 100 and 60000"),
        (format!("{SCHEDULER}?window=1000"), "unknown field `window`"),
        (format!("{SCHEDULER}/history?since_ms=60001"), "since_ms = 60001 is not between 100 and 60000"),
        ("/v1/schedulers?window_ms=0".to_owned(), "window_ms = 0 is not between 100 and 60000"),
    ] {
        let error = refused(client.get::<serde_json::Value>(&path));
        assert!(error.code == ErrorCode::Invalid && error.error.contains(what), "{path}: {error:?}");
    }
    let error = refused(client.get::<CardScheduler>("/v1/cards/card9/scheduler"));
    assert_eq!((error.code, &*error.error), (ErrorCode::NotFound, "there is no card `card9`"));
}

#[test]
fn share_of_a_vm_is_changed_key_by_key() {
    let served = one_card("");
    let client = served.client();
    let spec = AddVm { hang_limit_ms: Some(7000), ..AddVm::new("a", "card0", VM_MIB) };
    let _: api::Vm = client.post("/v1/vms", &spec).unwrap();
    add(&served, "b");
    let time: VmTime = client.get("/v1/vms/a/time").unwrap();
    assert_eq!((time.weight, time.cap_permille, time.max_run_ms), (100, 1000, Some(7000)));

    let time: VmTime = client.patch("/v1/vms/a/time", &json!({ "weight": 300, "class": "interactive" })).unwrap();
    assert_eq!((time.weight, time.class, time.max_run_ms), (300, LatencyClass::Interactive, Some(7000)));
    let time: VmTime = client.patch("/v1/vms/a/time", &json!({ "max_run_ms": 0, "cap_permille": 600 })).unwrap();
    assert_eq!((time.weight, time.cap_permille, time.max_run_ms), (300, 600, Some(0)));
    // A client can send the returned settings back unchanged.
    assert_eq!(client.patch::<VmTime>("/v1/vms/a/time", &time).unwrap(), time);

    let shown: CardScheduler = client.get(SCHEDULER).unwrap();
    assert_eq!(shown.vms[0].time, time, "the scheduler uses the new settings");
    // By weight, `a` would get three quarters, but its cap limits it to 60 %, so `b` gets the rest.
    assert_eq!(shown.vms.iter().map(|vm| vm.entitled_permille).collect::<Vec<_>>(), [600, 400]);

    // The copy engines have their own weights: nine to one.
    let copies: VmTime =
        client.patch("/v1/vms/a/time", &json!({ "copies": { "weight": 900, "cap_permille": 1000 } })).unwrap();
    assert_eq!((copies.copies.weight, copies.copies.cap_permille), (Some(900), Some(1000)));
    let shown: CardScheduler = client.get(SCHEDULER).unwrap();
    assert_eq!(shown.vms[0].time, copies);
    let parts: Vec<_> = shown.vms.iter().map(|vm| (vm.entitled_permille, vm.copies_entitled_permille)).collect();
    assert_eq!(parts, [(600, Some(900)), (400, Some(100))]);
    let single: CardScheduler = client.patch(SCHEDULER, &json!({ "queues": "single" })).unwrap();
    assert!(single.vms.iter().all(|vm| vm.copies_entitled_permille.is_none()), "a shared queue has one share");
    let _: CardScheduler = client.patch(SCHEDULER, &json!({ "queues": "separate" })).unwrap();
    let error = refused(client.patch::<VmTime>("/v1/vms/a/time", &json!({ "copies": { "weight": 0 } })));
    assert_eq!(error.error, "VM `a`: copies.weight = 0 is not between 1 and 10000");
    // `null` removes the copy settings, so that the compute settings apply again.
    let back = json!({ "copies": { "weight": null, "cap_permille": null } });
    assert_eq!(client.patch::<VmTime>("/v1/vms/a/time", &back).unwrap(), time);

    let error = refused(client.patch::<VmTime>("/v1/vms/a/time", &json!({ "guarantee_permille": 601 })));
    assert_eq!(error.error, "VM `a`: cap_permille = 600 is not between 601 and 1000");
    let error = refused(client.patch::<VmTime>("/v1/vms/a/time", &json!({ "wieght": 1 })));
    assert!(error.error.starts_with("VM `a`: wieght: unknown field"), "{error:?}");
    assert_eq!(client.get::<VmTime>("/v1/vms/a/time").unwrap(), time);
    assert_eq!(refused(client.get::<VmTime>("/v1/vms/c/time")).code, ErrorCode::NotFound);
    let released = client.request(Method::POST, "/v1/vms/c/release", Default::default());
    assert_eq!(refused(released).code, ErrorCode::NotFound);
}

#[test]
fn shares_are_taken_within_their_bounds_and_nothing_else_is() {
    let served = one_card("");
    add(&served, "a");
    let daemon = &served.fixture.daemon;
    let near = |bound: u32| prop_oneof![0..=bound + 1, bound - 1..=bound + 1, any::<u32>()];
    let strategy = (near(WEIGHT_MAX), near(PERMILLE), near(PERMILLE));
    let test = |(weight, guarantee_permille, cap_permille)| {
        let before = daemon.vm_time("a").unwrap();
        let patch = json!({
            "weight": weight, "guarantee_permille": guarantee_permille, "cap_permille": cap_permille
        });
        let params = VgpuParams { weight, guarantee_permille, cap_permille, ..VgpuParams::default() };
        match (daemon.set_vm_time("a", patch.as_object().unwrap()), params.check()) {
            (Ok(time), Ok(())) => {
                prop_assert_eq!(time, VmTime { weight, guarantee_permille, cap_permille, ..before });
                prop_assert_eq!(daemon.scheduler("card0", 1000).unwrap().vms[0].time, time);
            }
            (Err(error), Err(bounds)) => {
                let text = error.to_string();
                prop_assert_eq!(error.code(), ErrorCode::Invalid);
                for part in [bounds.name.to_owned(), bounds.value.to_string(), bounds.most.to_string()] {
                    prop_assert!(text.contains(&part), "{} in {}", part, text);
                }
                prop_assert_eq!(daemon.vm_time("a").unwrap(), before);
                prop_assert_eq!(daemon.scheduler("card0", 1000).unwrap().vms[0].time, before);
            }
            (Ok(time), Err(bounds)) => prop_assert!(false, "{time:?} in spite of {bounds}"),
            (Err(error), Ok(())) => prop_assert!(false, "{error} for {params:?}"),
        }
        Ok(())
    };
    TestRunner::default().run(&strategy, test).unwrap();
}

#[test]
fn vm_by_passthrough_and_its_card_have_no_scheduler() {
    let served = one_card("");
    let client = served.client();
    let set: CardScheduler = client.patch(SCHEDULER, &json!({ "policy": "fifo" })).unwrap();
    let spec = AddVm { passthrough: true, vram_mib: None, ..AddVm::new("p", "card0", 0) };
    let timed = AddVm { time: VmTime { weight: 7, ..VmTime::default() }, ..spec.clone() };
    assert!(
        refused(client.post::<api::Vm>("/v1/vms", &timed)).error.starts_with("VM `p`: time: expected no such table")
    );
    let _: api::Vm = client.post("/v1/vms", &spec).unwrap();
    let answers = [
        client.get::<serde_json::Value>(SCHEDULER),
        client.patch(SCHEDULER, &json!({ "policy": "band" })),
        client.get(&format!("{SCHEDULER}/history")),
        client.get("/v1/vms/p/time"),
        client.patch("/v1/vms/p/time", &json!({ "weight": 1 })),
        client.post("/v1/vms/p/release", &json!({})),
    ];
    for answer in answers {
        let error = refused(answer);
        assert_eq!(error.code, ErrorCode::Conflict);
        assert_eq!(
            error.error,
            "VM `p` uses its card in passthrough, or is a tenant of a CUDA card: its share of the card is fixed"
        );
    }
    assert_eq!(client.get::<SchedulerList>("/v1/schedulers").unwrap().schedulers, []);
    client.request(Method::GET, "/metrics", Default::default()).unwrap();
    // The settings survive the removal of VM `p`.
    client.delete("/v1/vms/p").unwrap();
    assert_eq!(client.get::<CardScheduler>(SCHEDULER).unwrap().settings, set.settings);
}

#[test]
fn work_is_seen_in_accounts_history_and_metrics() {
    const COPIES: u64 = 20;
    let served = one_card("time = { copy_mib_per_s = 1 }\n");
    let client = served.client();
    for name in ["a", "b"] {
        add(&served, name);
    }
    let mut guests = ["a", "b"].map(|name| guest(&served, name));
    for _ in 0..COPIES {
        guests.iter_mut().for_each(|(driver, channel)| copy(driver, channel));
        guests.iter_mut().for_each(|(driver, channel)| driver.wait(channel));
    }
    let shown = settled(&client);
    for vm in &shown.vms {
        let used = &vm.engines[&Engine::Compute];
        assert_eq!((used.arrived, used.started, used.completed, used.dropped), (COPIES, COPIES, COPIES, 0), "{vm:?}");
        assert!(used.longest_ns > 0 && used.used_ns >= used.longest_ns, "{used:?}");
        assert_eq!((used.wait.count, vm.engines[&Engine::Copy0].arrived), (COPIES, 0));
        assert_eq!((vm.strikes, vm.quarantine, vm.entitled_permille), (0, None, 500));
    }
    let used: u64 = shown.vms.iter().map(|vm| vm.engines[&Engine::Compute].used_ns).sum();
    assert_eq!((shown.engines[&Engine::Compute].busy_ns, shown.engines[&Engine::Compute].departed_ns), (used, 0));

    let history: SchedulerHistory = client.get(&format!("{SCHEDULER}/history?since_ms=60000")).unwrap();
    assert_eq!(history.vms.iter().map(|vm| &*vm.vm).collect::<Vec<_>>(), ["a", "b"]);
    for (history, vm) in history.vms.iter().zip(&shown.vms) {
        let sum: u64 = history.samples.iter().map(|sample| sample.used_ns[&Engine::Compute]).sum();
        assert_eq!(sum, vm.engines[&Engine::Compute].used_ns);
    }
    // The last interval may not have ended yet. Afterwards, the window's busy share is the sum of the VMs' shares, each
    // rounded down.
    let permille = |vm: &api::VmShare| vm.engines[&Engine::Compute].used_ns / (60 * 1_000_000);
    let expected: u64 = shown.vms.iter().map(permille).sum();
    assert!(expected > 0, "{shown:?}");
    crate::fixture::eventually("the window contains the use", || {
        let shown: CardScheduler = client.get(&format!("{SCHEDULER}?window_ms=60000")).unwrap();
        u64::from(shown.engines[&Engine::Compute].busy_permille) == expected
    });

    let metrics = Metrics::fetch(&client);
    for (vm, name) in shown.vms.iter().zip(["a", "b"]) {
        let labels = format!("{{vm=\"{name}\",card=\"card0\",engine=\"compute\"}}");
        let seconds = metrics.value(&format!("gpu_mediator_vm_engine_seconds_total{labels}"));
        assert!((seconds - vm.engines[&Engine::Compute].used_ns as f64 / 1e9).abs() < 1e-12, "{seconds}");
        assert_eq!(metrics.value(&format!("gpu_mediator_vm_submissions_total{labels}")), COPIES as f64);
        assert_eq!(metrics.value(&format!("gpu_mediator_vm_submissions_completed_total{labels}")), COPIES as f64);
        assert_eq!(metrics.value(&format!("gpu_mediator_vm_wait_seconds_count{labels}")), COPIES as f64);
        assert_eq!(metrics.value(&format!("gpu_mediator_vm_kills_total{labels}")), 0.0);
        assert_eq!(metrics.value(&format!("gpu_mediator_vm_quarantined{{vm=\"{name}\",card=\"card0\"}}")), 0.0);
        metrics.check_histogram(&format!("vm=\"{name}\",card=\"card0\",engine=\"compute\""), COPIES);
    }
    let busy = metrics.value("gpu_mediator_card_engine_busy_seconds_total{card=\"card0\",engine=\"compute\"}");
    assert!((busy - used as f64 / 1e9).abs() < 1e-12);

    // The card's total still includes a removed VM's time.
    client.delete("/v1/vms/a").unwrap();
    let after = settled(&client);
    let compute = after.engines[&Engine::Compute];
    assert_eq!((compute.busy_ns, after.vms.len()), (used, 1));
    assert_eq!(compute.departed_ns, shown.vms[0].engines[&Engine::Compute].used_ns);
    assert_eq!(after.vms[0].entitled_permille, 1000);
}

/// Metrics by name and labels, in the order of the exposition.
struct Metrics(Vec<(String, f64)>);

impl Metrics {
    fn fetch(client: &Client) -> Self {
        let text = client.request(Method::GET, "/metrics", Default::default()).unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        };
        Self(text.lines().filter(|line| !line.starts_with('#')).map(sample).collect())
    }

    fn value(&self, name: &str) -> f64 {
        let mut found = self.0.iter().filter(|(other, _)| other == name);
        let value = found.next().unwrap_or_else(|| panic!("no {name} in {:?}", self.0)).1;
        assert_eq!(found.next(), None, "{name} twice");
        value
    }

    /// Checks that bounds and counts ascend, and that the last bucket contains the total count.
    fn check_histogram(&self, labels: &str, count: u64) {
        let prefix = format!("gpu_mediator_vm_wait_seconds_bucket{{{labels},le=\"");
        let buckets: Vec<(f64, f64)> = self
            .0
            .iter()
            .filter_map(|(name, count)| Some((name.strip_prefix(&prefix)?, *count)))
            .map(|(bound, count)| (bound.trim_end_matches("\"}").replace("+Inf", "inf").parse().unwrap(), count))
            .collect();
        assert!(buckets.len() > 5, "{buckets:?}");
        assert!(buckets.is_sorted_by(|one, next| one.0 < next.0 && one.1 <= next.1), "{buckets:?}");
        assert_eq!(buckets.last(), Some(&(f64::INFINITY, count as f64)));
    }
}

#[test]
fn hung_vm_is_quarantined_until_operator_releases_it() {
    let served = one_card(
        "residue = \"keep\"\nscheduler = { strikes = 1 }\nfault = [{ engine = \"graph\", kind = \"hang\", after = 0, count = 1 }]\n",
    );
    let client = served.client();
    add(&served, "a");
    add(&served, "b");
    let _: VmTime = client.patch("/v1/vms/a/time", &json!({ "max_run_ms": 50 })).unwrap();
    let (mut bad, mut channel) = guest(&served, "a");
    copy(&mut bad, &mut channel);
    let mut shown = None;
    crate::fixture::eventually("the VM is quarantined", || {
        let scheduler: CardScheduler = client.get(SCHEDULER).unwrap();
        let vm = scheduler.vms[0].clone();
        shown = Some(vm.clone());
        vm.quarantine.is_some()
    });
    let vm = shown.unwrap();
    assert_eq!((vm.strikes, vm.entitled_permille, vm.engines[&Engine::Compute].killed), (1, 0, 1));
    assert_eq!(vm.quarantine, Some(api::Quarantine { ends_in_ms: None }));
    let metrics = Metrics::fetch(&client);
    assert_eq!(metrics.value("gpu_mediator_vm_quarantined{vm=\"a\",card=\"card0\"}"), 1.0);
    assert_eq!(metrics.value("gpu_mediator_vm_strikes{vm=\"a\",card=\"card0\"}"), 1.0);
    // The other VM gets the whole card, and makes progress.
    let (mut good, mut other) = guest(&served, "b");
    copy(&mut good, &mut other);
    good.wait(&other);
    assert_eq!(settled(&client).vms[1].entitled_permille, 1000);

    // A new channel of the quarantined VM waits for the VM's release.
    let mut second = bad.channel(2);
    bad.buffer(&second, FROM, 1, 3);
    let to = bad.buffer(&second, TO, 1, 4);
    copy(&mut bad, &mut second);
    assert!(bad.guest.settle());
    let waiting: CardScheduler = client.get(SCHEDULER).unwrap();
    assert_eq!((waiting.vms[0].queued, waiting.queued, waiting.in_flight), (1, 1, 0));
    client.request(Method::POST, "/v1/vms/a/release", Default::default()).unwrap();
    bad.wait(&second);
    assert!(bad.vram_holds(to, 1, 3));
    let vm = settled(&client).vms[0].clone();
    assert_eq!((vm.strikes, vm.quarantine, vm.entitled_permille), (0, None, 500));
}
