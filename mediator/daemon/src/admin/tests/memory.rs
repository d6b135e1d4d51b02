//! Tests of memory settings that an operator reads and changes while guests run.

use super::*;
use crate::fixture::eventually;
use crate::fixture::{copy, guest, one_card};
use api::{
    AccessProfile, Accessed, CardMemory, Counted, Hint, Hints, MemoryList, MoveReport, MoveRequest, Range, VmMemory,
    VmMemorySettings,
};
use rig::Machine;
use serde_json::json;

const MIB: u64 = 1 << 20;
const CARD: &str = "/v1/cards/card0/memory";
const VM: &str = "/v1/vms/a/memory";

/// Starts and serves a daemon whose card has host memory, with VM `a` without a guarantee.
fn swapping() -> Served {
    let served = one_card("overcommit = true\nmemory = { host_mib = 64, return_ms = 5, settle_ms = 5 }\n");
    let body = json!({ "name": "a", "card": "card0", "vram_mib": 32 });
    let _: api::Vm = served.client().post("/v1/vms", &body).unwrap();
    served
}

fn of_a(served: &Served) -> VmMemory {
    let memory: CardMemory = served.client().get(CARD).unwrap();
    memory.vms.into_iter().find(|vm| vm.vm == "a").unwrap()
}

#[test]
fn memory_report_of_card_adds_up() {
    let served = swapping();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let list: MemoryList = served.client().get("/v1/memory").unwrap();
    let [card] = &list.memories[..] else { panic!("one card") };
    assert_eq!((card.card_bytes, card.host_budget_bytes, card.host_used_bytes), (128 * MIB, 64 * MIB, 0));
    let vm = &card.vms[0];
    assert_eq!(vm.advertised_bytes, 32 * MIB);
    assert!(vm.on_card_bytes >= 2 * MIB && vm.entitled_bytes >= vm.on_card_bytes);
    let sum = vm.on_card_bytes + vm.in_reserve_bytes + vm.in_host_bytes + vm.unbacked_bytes;
    assert_eq!(sum, vm.advertised_bytes);
    assert_eq!((vm.guarantee_bytes, vm.relocations), (0, 0));
}

#[test]
fn memory_moves_on_operator_request_while_guest_works() {
    let served = swapping();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let client = served.client();
    // A quota keeps evicted memory off the card.
    let patch = json!({ "quota_mib": 2 });
    let settings: VmMemorySettings = client.patch(VM, &patch).unwrap();
    assert_eq!(settings.quota_mib, Some(2));
    eventually("the quota holds", || of_a(&served).on_card_bytes <= 2 * MIB);
    // The card counts a relocation when the VM resumes, after the last chunk has moved.
    eventually("the relocation is counted", || {
        let vm = of_a(&served);
        vm.in_host_bytes > 0 && vm.moved_out_bytes >= vm.in_host_bytes && vm.relocations > 0
    });
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let _: VmMemorySettings = client.patch(VM, &json!({ "quota_mib": null })).unwrap();
    let _: MoveReport = client.post(&format!("{VM}/return"), &MoveRequest::default()).unwrap();
    eventually("its memory is back on the card", || of_a(&served).in_host_bytes == 0);
    let report: MoveReport = client.post(&format!("{VM}/evict"), &MoveRequest { mib: Some(3), range: None }).unwrap();
    let page: api::EventPage = client.get("/v1/events?limit=1024").unwrap();
    let moved = page.events.last().unwrap();
    let text = format!("{} MiB of its memory were moved to host memory", report.moved_bytes >> 20);
    assert_eq!((moved.kind, &moved.text), (api::EventKind::MemoryMoved, &text));
    assert_eq!((moved.author.kind, moved.card.as_deref()), (api::AuthorKind::Client, Some("card0")));
    assert_eq!((report.moved_bytes, report.stayed_bytes), (4 * MIB, 0), "whole chunks");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    assert_eq!(driver.faults, []);
}

#[test]
fn recorded_accesses_of_working_guest_are_accepted_as_hints() {
    let served = swapping();
    let (mut driver, mut channel) = guest(&served, "a");
    let record = |ms: u64| {
        let answer =
            served.client().request(hyper::Method::POST, &format!("{VM}/accesses?for_ms={ms}"), Default::default());
        answer.map(|body| serde_json::from_slice::<AccessProfile>(&body).unwrap())
    };
    assert!(record(0).unwrap_err().to_string().contains("for_ms = 0"));
    let daemon = &served.fixture.daemon;
    let begun = daemon.record_vm_accesses("a").unwrap();
    let refused = record(10).unwrap_err();
    assert!(refused.to_string().contains("are already being counted"), "{refused}");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let profile = begun.end().unwrap();
    // This card has no hardware access counters.
    assert_eq!(profile.counted, Counted::Submissions);
    assert!(!profile.ranges.is_empty() && profile.ranges.iter().all(|accessed| accessed.count > 0), "{profile:?}");
    let hint = |accessed: &Accessed| Hint { range: accessed.range, pinned: None, priority: None, accesses: Some(1) };
    let hints = Hints { hints: profile.ranges.iter().map(hint).collect() };
    let body = serde_json::to_vec(&hints).unwrap();
    served.client().request(hyper::Method::POST, &format!("{VM}/hints"), body.into()).unwrap();
    // Dropping a recording early has no effect. Without work, no accesses are counted.
    drop(daemon.record_vm_accesses("a").unwrap());
    assert_eq!(record(10).unwrap().ranges, []);
}

/// Returns the value of a metric's sample.
fn metric(served: &Served, sample: &str) -> f64 {
    let text = served.client().request(hyper::Method::GET, "/metrics", Default::default()).unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {sample} in\n{text}")).parse().unwrap()
}

#[test]
fn relocations_are_counted_by_how_long_the_vm_was_suspended() {
    let served = swapping();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let client = served.client();
    let out: MoveReport = client.post(&format!("{VM}/evict"), &MoveRequest::default()).unwrap();
    assert!(out.moved_bytes > 0 && out.suspended_ns > 0, "{out:?}");
    // Wait until the evicted memory has returned. The suspension is counted shortly afterwards.
    eventually("its memory is back on the card", || {
        let vm = of_a(&served);
        vm.in_host_bytes == 0 && vm.suspensions.count >= 2
    });
    let vm = of_a(&served);
    let suspensions = &vm.suspensions;
    assert_eq!((suspensions.count, suspensions.sum_ns), (vm.relocations, vm.suspended_ns));
    assert_eq!(suspensions.max_ns, vm.suspended_longest_ns);
    assert!(suspensions.p50_ns <= suspensions.p99_ns && suspensions.p99_ns <= suspensions.max_ns);
    assert!(suspensions.max_ns >= out.suspended_ns);
    let labels = "{vm=\"a\",card=\"card0\"";
    let of = |name: &str, more: &str| metric(&served, &format!("gpu_mediator_{name}{labels}{more}}}"));
    assert_eq!(of("vm_suspended_seconds_count", "") as u64, suspensions.count);
    assert_eq!(of("vm_suspended_seconds_bucket", ",le=\"+Inf\"") as u64, suspensions.count);
    assert!((of("vm_suspended_seconds_sum", "") - suspensions.sum_ns as f64 / 1e9).abs() < 1e-9);
    assert_eq!(of("vm_memory_moved_bytes_total", ",to=\"host\"") as u64, vm.moved_out_bytes);
    // The card's counters outlive the VM.
    client.delete("/v1/vms/a").unwrap();
    let card: CardMemory = client.get(CARD).unwrap();
    assert_eq!((card.moved_out_bytes, card.moved_in_bytes), (vm.moved_out_bytes, vm.moved_in_bytes));
}

#[test]
fn pin_beyond_guarantee_is_rejected_and_within_it_accepted() {
    let served = swapping();
    let (_driver, _) = guest(&served, "a");
    let client = served.client();
    let range = Range { start: 0, bytes: 2 * MIB };
    let hint = Hint { range, pinned: Some(true), priority: None, accesses: None };
    let hints = |hint| Hints { hints: vec![hint] };
    let post = |hints: &Hints| {
        client.request(hyper::Method::POST, &format!("{VM}/hints"), serde_json::to_vec(hints).unwrap().into())
    };
    let error = refused(post(&hints(hint)));
    assert_eq!(error.code, ErrorCode::Quota);
    let what = "VM `a`: 2 MiB would be pinned, expected at most `memory.guarantee_mib`, which is 0 MiB";
    assert_eq!(error.error, what);
    assert!(error.what_to_do.contains("`mediatorctl memory set-guarantee`"), "{error:?}");
    let _: VmMemorySettings = client.patch(VM, &json!({ "guarantee_mib": 4 })).unwrap();
    post(&hints(hint)).unwrap();
    assert_eq!(of_a(&served).pinned_bytes, 2 * MIB);
    let _: VmMemorySettings = client.patch(VM, &json!({ "quota_mib": 4 })).unwrap();
    eventually("the quota holds", || of_a(&served).on_card_bytes <= 4 * MIB);
    let outside = Hint { range: Range { start: 31 * MIB, bytes: 2 * MIB }, ..hint };
    let error = post(&hints(outside)).unwrap_err().to_string();
    assert!(error.contains("expected some of the guest's 0x2000000"), "{error}");
}

#[test]
fn impossible_memory_settings_are_rejected_and_change_nothing() {
    let served = swapping();
    let client = served.client();
    for (path, patch, what) in [
        (VM, json!({ "quota_mib": 4, "guarantee_mib": 8 }), "expected at most the quota of 4 MiB"),
        (VM, json!({ "quota_mib": 3 }), "expected a multiple of the chunk"),
        (VM, json!({ "swap_cap_mib": 16 }), "memory.swap_cap_mib: 16 MiB, expected at least 32"),
        (VM, json!({ "quota": 3 }), "unknown field `quota`"),
        (CARD, json!({ "host_mib": 128 }), "expected at most the 64 that the daemon was started with"),
        (CARD, json!({ "host_mib": 16 }), "VM `a`"),
        (CARD, json!({ "return_ms": 0 }), "memory.return_ms: 0, expected 1"),
        (CARD, json!({ "victims": "oldest" }), "`oldest` is not a policy"),
    ] {
        let error = client.patch::<serde_json::Value>(path, &patch).unwrap_err().to_string();
        assert!(error.contains(what), "{patch}: {error}");
    }
    let settings: VmMemorySettings = client.get(VM).unwrap();
    assert_eq!(settings, VmMemorySettings::default());
    let card: CardMemory = client.patch(CARD, &json!({ "victims": "clock", "quanta": { "mode": "off" } })).unwrap();
    assert_eq!(card.settings.victims.name(), "clock");
    assert_eq!((card.settings.return_ms, card.settings.host_mib), (5, 64));
}

#[test]
fn rejection_names_object_limit_value_and_remedy() {
    let served = one_card("overcommit = true\nreserve_mib = 8\nmemory = { host_mib = 64 }\n");
    let client = served.client();
    for (name, vram_mib) in [("a", 32), ("b", 32)] {
        let _: api::Vm =
            client.post("/v1/vms", &json!({ "name": name, "card": "card0", "vram_mib": vram_mib })).unwrap();
    }
    let _: VmMemorySettings = client.patch("/v1/vms/b/memory", &json!({ "guarantee_mib": 32 })).unwrap();
    let (quota, invalid) = (ErrorCode::Quota, ErrorCode::Invalid);
    let vm = |more: serde_json::Value| {
        let mut body = json!({ "name": "c", "card": "card0", "vram_mib": 16 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let refuse = json!({ "on_full": "refuse" });
    // Each case contains a request's method, path and body, and the expected error's code, object, key and limit.
    let post = Method::POST;
    let patch = Method::PATCH;
    let all = "/v1/vms";
    let cases: [(&Method, &str, serde_json::Value, ErrorCode, &str, &str, &str); 12] = [
        (
            &post,
            all,
            vm(json!({ "memory": { "guarantee_mib": 96 }, "vram_mib": 96 })),
            quota,
            "VM `c`",
            "memory.guarantee_mib",
            "at most 88",
        ),
        (&post, all, vm(json!({ "vram_mib": 64 })), quota, "VM `c`", "memory.host_mib", "is 64"),
        (
            &post,
            all,
            vm(json!({ "vram_mib": 96, "memory": { "guarantee_mib": 89 } })),
            invalid,
            "VM `c`",
            "memory.guarantee_mib",
            "chunk of 2048 KiB",
        ),
        (
            &patch,
            VM,
            json!({ "quota_mib": 4, "guarantee_mib": 8 }),
            invalid,
            "VM `a`",
            "memory.guarantee_mib",
            "quota of 4 MiB",
        ),
        (&patch, VM, json!({ "swap_cap_mib": 4 }), invalid, "VM `a`", "memory.swap_cap_mib", "at least 32"),
        (&patch, VM, json!({ "weight": 0 }), invalid, "VM `a`", "memory.weight", "1 to 10000"),
        (&patch, VM, json!({ "quota_mib": 3 }), invalid, "VM `a`", "memory.quota_mib", "chunk of 2048 KiB"),
        (&patch, CARD, json!({ "host_mib": 16 }), quota, "VM `a`", "memory.host_mib", "is 16"),
        (&patch, CARD, json!({ "host_mib": 128 }), invalid, "card `card0`", "memory.host_mib", "at most the 64"),
        (&patch, CARD, json!({ "reserve_mib": 100 }), quota, "card `card0`", "memory.reserve_mib", "100 MiB"),
        (
            &patch,
            CARD,
            json!({ "reserve_mib": 120 }),
            invalid,
            "card `card0`",
            "memory.reserve_mib",
            "less than the 120",
        ),
        (
            &post,
            &format!("{VM}/hints"),
            json!({ "hints": [{ "range": { "start": 0, "bytes": 4 << 20 }, "pinned": true }] }),
            quota,
            "VM `a`",
            "memory.guarantee_mib",
            "4 MiB would be pinned",
        ),
    ];
    let before = client.request(Method::GET, "/v1/desired", Default::default()).unwrap();
    for (method, path, body, code, whose, key, value) in cases {
        let error = refused(client.request(method.clone(), path, serde_json::to_vec(&body).unwrap().into()));
        assert_eq!(error.code, code, "{body}: {error:?}");
        let text = &error.error;
        assert!(
            text.starts_with(&format!("{whose}: ")) && text.contains(key) && text.contains(value),
            "{body}: {text}"
        );
        assert!(!error.what_to_do.is_empty() && !text.contains(" chunks"), "{body}: {error:?}");
    }
    // The remaining memory is less than a guest needs to start.
    let _: VmMemorySettings = client.patch(VM, &json!({ "guarantee_mib": 32 })).unwrap();
    let _: api::Vm =
        client.post("/v1/vms", &vm(json!({ "name": "d", "vram_mib": 48, "memory": { "guarantee_mib": 48 } }))).unwrap();
    let error = refused(client.post::<api::Vm>("/v1/vms", &vm(json!({ "memory": refuse }))));
    assert_eq!(error.code, quota, "{error:?}");
    assert!(
        error.error.starts_with("VM `c`: memory.on_full: with `refuse`")
            && error.error.contains(" MiB of card `card0`, expected at least 16"),
        "{error:?}"
    );
    assert!(error.what_to_do.contains("`memory.guarantee_mib`"), "{error:?}");
    client.delete("/v1/vms/d").unwrap();
    let _: VmMemorySettings = client.patch(VM, &json!({ "guarantee_mib": null })).unwrap();
    let [before, after] = [before, client.request(Method::GET, "/v1/desired", Default::default()).unwrap()]
        .map(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).unwrap());
    assert_eq!((&before["vm"], &before["card"]), (&after["vm"], &after["card"]), "a rejected change has no effect");
}

/// Timeout of each wait, longer than any step of these tests.
const WAIT_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(60);

/// Starts a guest in VM `a` that uses most of the card's memory. Requests a guarantee for VM `b` that needs part of
/// this memory, while memory cannot move. Calls `meanwhile` while the request waits. Returns the result of the request.
fn raised_guarantee(
    served: &Served,
    if_match: Option<&str>,
    meanwhile: impl FnOnce() + Send,
) -> Result<VmMemorySettings, crate::DaemonError> {
    let (driver, _channel) = guest(served, "a");
    for mib in (4..96).step_by(2) {
        driver.guest.vram_write(mib * MIB, &[1; 4]);
    }
    // Wait for the writes: a read completes only after all earlier writes.
    driver.guest.vram_read(4 * MIB, &mut [0; 4]);
    let daemon = &served.fixture.daemon;
    let host = daemon.host_of("card0").unwrap();
    let revision = daemon.revision();
    let if_match = if_match.map(|_| revision.as_str());
    std::thread::scope(|scope| {
        let stopped = host.hold_moves();
        let patch = json!({ "guarantee_mib": 48 }).as_object().cloned().unwrap();
        let raising = scope.spawn(move || daemon.set_vm_memory_if("b", &patch, if_match));
        eventually("the request waits for memory", || host.makes_room());
        let (tell, told) = std::sync::mpsc::channel();
        scope.spawn(move || {
            // The watchdog also reads the revision.
            let _ = daemon.revision();
            daemon.memory("card0").unwrap();
            meanwhile();
            tell.send(()).unwrap();
        });
        let goes_on = told.recv_timeout(WAIT_TIMEOUT);
        drop(stopped);
        let raised = raising.join().unwrap();
        assert_eq!(goes_on, Ok(()), "other requests wait while memory is moved");
        raised
    })
}

/// Starts and serves a daemon whose card has three VMs, of which `a` can use three quarters of the VRAM.
fn large() -> Served {
    let served = one_card("overcommit = true\nmemory = { host_mib = 192, return_ms = 5, settle_ms = 5 }\n");
    for (name, vram_mib) in [("a", 96), ("b", 64), ("c", 16)] {
        let body = json!({ "name": name, "card": "card0", "vram_mib": vram_mib });
        let _: api::Vm = served.client().post("/v1/vms", &body).unwrap();
    }
    served
}

#[test]
fn daemon_answers_while_memory_moves_for_guarantee() {
    let served = large();
    let raised = raised_guarantee(&served, None, || ()).unwrap();
    assert_eq!(raised.guarantee_mib, Some(48));
    let kept: VmMemorySettings = served.client().get("/v1/vms/b/memory").unwrap();
    assert_eq!(kept.guarantee_mib, Some(48));
}

#[test]
fn guarantee_is_withdrawn_if_vms_change_while_memory_moves() {
    let served = large();
    let client = served.client();
    let changed = raised_guarantee(&served, Some("now"), || {
        client.delete("/v1/vms/c").unwrap();
    });
    assert!(changed.is_err(), "{changed:?}");
    let kept: VmMemorySettings = served.client().get("/v1/vms/b/memory").unwrap();
    assert_eq!(kept.guarantee_mib, None);
    let memory: CardMemory = served.client().get(CARD).unwrap();
    assert_eq!(memory.vms.iter().find(|vm| vm.vm == "b").unwrap().guarantee_bytes, 0);
}

#[test]
fn evict_without_host_memory_says_which_limit_holds() {
    let served = one_card("overcommit = true\n");
    let body = json!({ "name": "a", "card": "card0", "vram_mib": 32 });
    let _: api::Vm = served.client().post("/v1/vms", &body).unwrap();
    let (mut driver, mut channel) = guest(&served, "a");
    copy(&mut driver, &mut channel);
    driver.wait(&channel);
    let report: MoveReport = served.client().post(&format!("{VM}/evict"), &MoveRequest::default()).unwrap();
    assert!(report.moved_bytes == 0 && report.stayed_bytes > 0, "{report:?}");
    let reason = report.reason.unwrap();
    assert!(reason.contains("`memory.host_mib` is 0; set it in the configuration file"), "{reason}");
}
