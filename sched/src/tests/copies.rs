//! Tests copy engine shares that differ from compute shares.

use crate::sim::{Guest, Length, Outcome, Scenario, Step, Stream, run};
use crate::{Config, CopyShare, Engine, Nanos, PolicyKind, Queues, SavedScheduler, Scheduler, TenantId, VgpuParams};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MS;

fn share(weight: u32, copies: CopyShare) -> VgpuParams {
    VgpuParams { copies, ..VgpuParams::weight(weight) }
}

fn weight(weight: u32) -> CopyShare {
    CopyShare { weight: Some(weight), ..CopyShare::AS_COMPUTE }
}

/// Returns a VM that always computes and copies, on two channels.
fn both(params: VgpuParams, copy: u64) -> Guest {
    let kernels = Stream { depth: 3, ..Stream::looping(Length::Fixed(MS / 2), Length::Fixed(20_000)) };
    let step = Step { engine: Engine::Copy0, length: Length::Fixed(copy) };
    let copies = Stream { steps: vec![step], ..kernels.clone() };
    Guest { params, streams: vec![kernels, copies], ..Guest::new(Stream::looping(Length::Fixed(1), Length::Fixed(1))) }
}

fn parts(outcome: &Outcome, engine: Engine) -> Vec<f64> {
    outcome.shares(engine, SECOND, u64::MAX)
}

fn near(parts: &[f64], wanted: [f64; 2]) -> bool {
    parts.iter().zip(wanted).all(|(part, wanted)| (part - wanted).abs() < 0.02)
}

#[test]
fn copies_are_divided_by_their_own_weights() {
    for policy in [PolicyKind::Band, PolicyKind::Credit] {
        // Compute shares are equal, and copy shares are 3:1, regardless of the lengths of the copies.
        let guests = vec![both(share(100, weight(300)), MS), both(share(100, CopyShare::AS_COMPUTE), 3 * MS)];
        let outcome = run(&Scenario::new(Config { policy, ..Config::default() }, 10 * SECOND, guests), 7).unwrap();
        let (compute, copies) = (parts(&outcome, Engine::Compute), parts(&outcome, Engine::Copy0));
        assert!(near(&compute, [0.5, 0.5]) && near(&copies, [0.75, 0.25]), "{policy:?}: {compute:?}, {copies:?}");
    }
}

#[test]
fn a_cap_of_copies_leaves_compute_alone() {
    let capped = share(100, CopyShare { cap_permille: Some(200), ..CopyShare::AS_COMPUTE });
    let outcome = run(&Scenario::new(Config::default(), 10 * SECOND, vec![both(capped, MS)]), 7).unwrap();
    let used = |engine| outcome.used(0, engine, SECOND, 10 * SECOND) as f64 / (9 * SECOND) as f64;
    assert!(used(Engine::Compute) > 0.9, "{}", used(Engine::Compute));
    assert!((used(Engine::Copy0) - 0.2).abs() < 0.02, "{}", used(Engine::Copy0));
}

#[test]
fn one_queue_for_all_engines_has_one_share() {
    let config = Config { queues: Queues::Single, ..Config::default() };
    let guests = vec![both(share(100, weight(900)), MS / 2), both(share(100, CopyShare::AS_COMPUTE), MS / 2)];
    let outcome = run(&Scenario::new(config, 10 * SECOND, guests), 7).unwrap();
    let used = |vm| Engine::ALL.map(|engine| outcome.used(vm, engine, SECOND, 10 * SECOND)).iter().sum::<u64>() as f64;
    assert!((used(0) / used(1) - 1.0).abs() < 0.05, "{} and {}", used(0), used(1));
}

#[test]
fn settings_of_copies_have_their_bounds() {
    let wrong = |copies| share(100, copies).check().unwrap_err().to_string();
    assert!(wrong(weight(0)).contains("copies.weight = 0"));
    let cap = CopyShare { cap_permille: Some(1001), ..CopyShare::AS_COMPUTE };
    assert!(wrong(cap).contains("copies.cap_permille = 1001"));
    // Unset copy settings are inherited from the compute settings, so the combination must be consistent.
    let guaranteed = VgpuParams { guarantee_permille: 500, ..share(100, CopyShare { cap_permille: Some(400), ..cap }) };
    assert!(guaranteed.check().unwrap_err().to_string().contains("copies.cap_permille = 400 is not between 500"));
}

/// Creates a scheduler with two vGPUs, the first of which has a separate copy engine share.
fn scheduler() -> Scheduler {
    let mut scheduler = Scheduler::new(Config::default(), Nanos(0)).unwrap();
    for (vgpu, params) in [(0, share(100, weight(300))), (1, share(200, CopyShare::AS_COMPUTE))] {
        scheduler.event(Nanos(0), crate::Event::Added { vgpu: TenantId(vgpu), params }, &mut Vec::new());
    }
    scheduler
}

#[test]
fn copy_shares_survive_save() {
    let (before, now) = (scheduler(), Nanos(1));
    let of = |scheduler: &Scheduler, vgpu| *scheduler.params(TenantId(vgpu)).unwrap();
    let through = |saved: &SavedScheduler| postcard::from_bytes(&postcard::to_allocvec(saved).unwrap()).unwrap();
    let after = Scheduler::restored(through(&before.save()), now).unwrap();
    assert_eq!((of(&after, 0), of(&after, 1)), (of(&before, 0), of(&before, 1)));
}

#[test]
fn a_record_has_them() {
    let text = serde_json::to_string(&scheduler()).unwrap();
    let read: Scheduler = serde_json::from_str(&text).unwrap();
    assert_eq!(read.params(TenantId(0)), scheduler().params(TenantId(0)));
    // Settings that were saved before the introduction of copy shares do not contain any.
    let plain = serde_json::to_string(&VgpuParams::weight(3)).unwrap();
    assert!(!plain.contains("copies"), "{plain}");
    assert_eq!(serde_json::from_str::<VgpuParams>(&plain).unwrap(), VgpuParams::weight(3));
}
