//! Converts the configuration of a CUDA card and its tenants to the owner's form: [`settings`] at startup, [`rules`]
//! that can change while the owner runs, and each [`tenant`].
//!
//! The crate does not send requests to owners, and does not keep state.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use config::cuda::gang_number;
use config::{CardKind, CardSpec, CudaSpec, FunctionSpec, OnStuck, TenantSpec, workers_socket};
use cuda_control::{Gang, GangSettings, MemoryShare, MpsSettings, Quanta, Rules, Settings, Tenant, TimeShare};
use gang::{CardId, GangId};
use overrides::Tuning;

/// Bytes per MiB.
const MIB: u64 = 1 << 20;
/// Nanoseconds per millisecond.
const MS: u64 = 1_000_000;
/// Default length of a quantum, as a multiple of the duration of the copies at its start (decision 120).
const QUANTUM_FACTOR: u32 = 80;

/// Returns the number that identifies a card to the owners of all cards.
fn card_number(card: &str) -> CardId {
    CardId(gang_number(card))
}

/// Returns the path of the socket on which a card's owner listens for the owners of other cards.
fn owner_socket(card: &str, folder: &Path) -> PathBuf {
    folder.join(config::cuda::owner_socket(card))
}

/// Returns the devices of those `cards` to which the programs of card `spec` could move.
fn others(spec: &CardSpec, cards: &[CardSpec]) -> Vec<String> {
    let here = spec.cuda();
    let suits = |card: &&CardSpec| {
        let cuda = card.cuda();
        let same = cuda.driver == here.driver && cuda.chunk_mib == here.chunk_mib;
        card.kind == CardKind::Cuda && card.name != spec.name && cuda.moves && here.moves && same
    };
    cards.iter().filter(suits).map(|card| card.cuda().device).collect()
}

/// Returns the startup settings of a card's owner. `cards` are the cards of the host. The owner stores the list of its
/// programs in `folder`.
#[must_use]
pub fn settings(spec: &CardSpec, cards: &[CardSpec], folder: &Path) -> Settings {
    let cuda = spec.cuda();
    let CudaSpec {
        device,
        driver,
        worker: _,
        worker_users: _,
        sandbox: _,
        chunk_mib,
        host_ready_mib,
        slice_ms,
        run_ahead_us,
        strangers,
        margin_mib,
        moves: _,
        mps_control,
        orphan_timeout_s: _,
    } = cuda;
    Settings {
        driver,
        device,
        card_bytes: spec.vram_mib * MIB,
        host_bytes: spec.memory.host_mib * MIB,
        host_ready_bytes: host_ready_mib.min(spec.memory.host_mib) * MIB,
        chunk_bytes: chunk_mib * MIB,
        slice_ns: slice_ms * MS,
        run_ahead_us,
        kills_strangers: strangers == config::OnStranger::Kill,
        margin_bytes: margin_mib * MIB,
        rules: rules(spec, &Tuning::from_spec(spec)),
        journal: folder.join(format!("{}.programs", spec.name)),
        mps: Some(MpsSettings { program: mps_control, folder: folder.join(format!("{}.mps", spec.name)) }),
        gangs: Some(GangSettings { card: card_number(&spec.name), socket: owner_socket(&spec.name, folder) }),
        others: others(spec, cards),
    }
}

/// Converts the rules for sharing a card to the owner's form.
#[must_use]
pub fn rules(spec: &CardSpec, tuning: &Tuning) -> Rules {
    let Tuning { scheduler, memory, .. } = *tuning;
    let quanta = memory.quanta;
    Rules {
        scheduler,
        host_bytes: memory.host_mib.min(spec.memory.host_mib) * MIB,
        low_water_bytes: memory.low_water_mib * MIB,
        victims: memory.victims.name().to_owned(),
        return_ns: memory.return_ms * MS,
        settle_ns: memory.settle_ms * MS,
        idle_ns: memory.idle_ms * MS,
        quanta: Quanta {
            mode: quanta.mode.to_string(),
            window_ns: quanta.window_ms * MS,
            on_permille: quanta.on_permille,
            margin_permille: quanta.margin_permille,
            factor: quanta.factor.unwrap_or(QUANTUM_FACTOR),
            min_ns: quanta.min_ms * MS,
            max_ns: quanta.max_ms * MS,
        },
    }
}

/// Converts a tenant to the form used by the owner of one of the tenant's cards. `function` is the CUDA function of a
/// VM tenant. The last argument is the user and group of the tenant's socket.
#[must_use]
pub fn tenant(
    spec: &TenantSpec,
    card: &CardSpec,
    socket_dir: &Path,
    function: Option<FunctionSpec>,
    (uid, gid): (Option<u32>, Option<u32>),
) -> Tenant {
    let (memory, time) = (&spec.memory, spec.time.params(None));
    let class = serde_json::to_value(time.class).ok().and_then(|name| name.as_str().map(str::to_owned));
    let gang = (!spec.cards.is_empty()).then(|| Gang {
        number: GangId(gang_number(&spec.name)),
        cards: spec.cards.iter().map(|card| (card_number(card), owner_socket(card, socket_dir))).collect(),
    });
    let (socket, mode) = match function {
        None => (spec.socket_on(&card.name, socket_dir), spec.mode.0),
        // Workers with user accounts of their own are in the daemon's group.
        Some(_) if card.cuda().worker_users.is_some() => (workers_socket(&spec.name, &card.name, socket_dir), 0o660),
        Some(_) => (workers_socket(&spec.name, &card.name, socket_dir), spec.mode.0),
    };
    Tenant {
        name: spec.name.clone(),
        memory_bytes: spec.vram_mib * MIB,
        window_bytes: function.map_or(0, |function| function.window_mib * MIB),
        memory: MemoryShare {
            quota: memory.quota_mib.map(|mib| mib * MIB),
            guarantee: memory.guarantee_mib.unwrap_or(0) * MIB,
            swap_cap: memory.swap_cap_mib.map(|mib| mib * MIB),
            weight: memory.weight.unwrap_or(vram::Limits::default().weight),
            on_full: memory.policy(card).to_string(),
        },
        time: TimeShare {
            weight: time.weight,
            guarantee_permille: time.guarantee_permille,
            cap_permille: time.cap_permille,
            class: class.unwrap_or_default(),
            max_run_ns: time.max_run_ns,
        },
        suspends: spec.on_stuck == OnStuck::Suspend,
        socket,
        mode,
        uid,
        gid,
        share_group: Some(spec.share_group.clone()).filter(|name| !name.is_empty()),
        sharing: spec.sharing,
        gang,
        arrives: false,
    }
}
