//! Compares the accounts with NVML and the driver, to detect card memory that a tenant uses beyond its account. The
//! owner compares three numbers every second: the memory allocated to a tenant's processes, the bytes that NVML reports
//! for each process, and the used bytes of the card that NVML does not attribute to any process. On an H100 with driver
//! 580, NVML counts an allocation once: for its creator as long as the creator holds it, and then for a process that
//! has imported it. A chunk is charged to the owner until the owner releases it, and then to a program that keeps a
//! handle or mapping of it. Memory that only a descriptor keeps allocated is not attributed to any process, but reduces
//! the free memory of the card. Managed memory is not attributed to any process either; the accounts count the requests
//! for it.
//!
//! The worker that releases a piece measures whether the card's free memory grows by the size of the piece. If the free
//! memory grows less, the tenant is a suspect for some polls. If NVML then reports used memory without a process, the
//! suspects are charged for it, up to the size of their missing memory. The charge remains until the memory is free,
//! even after their programs have exited. Two kinds of releases are less certain: those of an exiting program, which
//! closes its connection shortly before it releases its memory, and those of other kinds of memory, which are not
//! measured. For these, a tenant is charged only for the part that cannot be another tenant's missing memory.

use std::collections::BTreeMap;

use cuda_protocol::FixedKind;
use vram::{Error, Limit, TenantId};

use super::given_up::Reason;
use super::types::{OnStranger, PieceId, Unaccounted, User};
use super::{Body, Core};
use owner_driver::Memory;

/// Number of polls during which a tenant remains a suspect. An exiting process releases its memory within seconds.
const SUSPECT_LOOKS: usize = 5;
/// Upper bound on the bytes of a process's contexts that NVML does not attribute to any process: 5.6 MiB on an H100
/// with driver 580.
const HIDDEN_BYTES: u64 = 8 << 20;
/// Assumed size of a context in bytes, until the first poll at which the owner has no pieces.
const UNKNOWN_CONTEXT: u64 = 1 << 30;
/// Minimum interval between two log lines about one tenant, in ns, unless the tenant's excess has doubled.
const LINES_NS: u64 = 60_000_000_000;

/// Results of the last poll, and values derived from earlier polls.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    /// Size of one context in bytes, as NVML reports it for the owner.
    context: Option<u64>,
    /// Bytes of each tenant process in excess of its account: the value at the last poll, and the charged value, which
    /// is the minimum of the last two polls.
    beyond: BTreeMap<u32, (TenantId, String, u64, u64)>,
    suspects: BTreeMap<TenantId, Suspect>,
    /// Lowest number of bytes that NVML did not attribute to any process.
    baseline: Option<u64>,
    /// Number of processes that NVML reported at the last poll, including the owner.
    processes: u64,
    /// Bytes at the last poll that NVML did not attribute to any process, in excess of the expected number.
    gap: u64,
    /// Number of bytes that cannot be charged to any process or tenant.
    unexplained: u64,
    /// Set if the last queries of NVML and the driver succeeded.
    sees: bool,
    /// Number of polls so far.
    looks: u64,
}

/// A tenant's released memory that did not become free, in bytes per poll, latest poll first.
#[derive(Debug, Default)]
struct Suspect {
    /// Memory of chunks that were released while their programs were connected.
    sure: [u64; SUSPECT_LOOKS],
    /// Memory whose release may still be in progress.
    perhaps: [u64; SUSPECT_LOOKS],
}

fn sum(looks: &[u64]) -> u64 {
    looks.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
}

/// A tenant's memory beyond its account.
#[derive(Debug, Default)]
pub(super) struct Past {
    /// Bytes of the tenant's processes in excess of their accounts.
    pub(super) beyond: u64,
    /// Bytes that the tenant has released and that are still in use, but not by any process.
    pub(super) kept: u64,
    /// Indices that are reserved for the memory in `beyond` and `kept`.
    pub(super) indices: Vec<u32>,
    /// Total of `beyond` and `kept` in excess of the tenant's limits, in bytes.
    pub(super) over: u64,
    /// Excess in bytes at the last log line, and the time of that line in ns.
    told: Option<(u64, u64)>,
}

impl Past {
    /// Returns the number of bytes beyond the account.
    pub(super) fn bytes(&self) -> u64 {
        self.beyond.saturating_add(self.kept)
    }
}

impl Core {
    /// Records the processes that use the card, and charges tenants for memory beyond their accounts. `users` does not
    /// contain the owner, which uses `own` bytes itself.
    pub(super) fn compare(&mut self, users: &[User], own: Option<u64>) {
        // Without pieces, the owner's memory contains only its context. The first poll happens before any program
        // connects.
        if self.pieces.count(Memory::Device) == 0
            && let Some(own) = own
        {
            self.accounts.context = Some(self.accounts.context.map_or(own, |context| context.min(own)));
        }
        let allowed = self.accounts.context.unwrap_or(UNKNOWN_CONTEXT).saturating_add(self.config.margin_bytes);
        let accounts = self.counted();
        let mut before = std::mem::take(&mut self.accounts.beyond);
        self.accounts.processes = users.len() as u64 + 1;
        for user in users {
            let Some(bytes) = user.bytes else { continue };
            let Some(&(tenant, counted)) = accounts.get(&user.pid) else { continue };
            let now = bytes.saturating_sub(allowed).saturating_sub(counted);
            let counts = before.remove(&user.pid).map_or(0, |(_, _, last, _)| last.min(now));
            if now > 0 {
                self.accounts.beyond.insert(user.pid, (tenant, user.program.clone(), now, counts));
            }
        }
        let tenants: Vec<TenantId> = self.tenants.keys().copied().collect();
        for id in tenants {
            let of_it = self.accounts.beyond.values().filter(|(tenant, ..)| *tenant == id);
            let beyond = of_it.fold(0u64, |sum, (.., counts)| sum.saturating_add(*counts));
            if let Some(tenant) = self.tenants.get_mut(&id) {
                tenant.past.beyond = beyond;
            }
            self.charge(id);
        }
    }

    /// Returns each process's tenant, and the number of bytes that NVML may report for the process according to its
    /// account.
    fn counted(&self) -> BTreeMap<u32, (TenantId, u64)> {
        let mut counted = BTreeMap::new();
        for session in self.sessions.values() {
            let Some(tenant) = session.tenant else { continue };
            let fixed = session.fixed.iter().filter(|(kind, _)| is_the_processes(**kind));
            let fixed = fixed.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
            // NVML may attribute memory allocated by an earlier owner to any process that uses it.
            let adopted = session.adopted.len() as u64 * self.table.chunk_bytes();
            let (_, sum) = counted.entry(session.pid).or_insert((tenant, 0u64));
            *sum = sum.saturating_add(fixed).saturating_add(adopted);
        }
        // An abandoned process that still runs may use memory of its tenant that no account contains.
        for (&pid, name) in &self.given_up {
            if let Some(tenant) = self.tenant(name) {
                counted.entry(pid).or_insert((tenant, 0));
            }
        }
        counted
    }

    /// Records the used bytes of the card that NVML does not attribute to any process.
    pub(super) fn in_use_for_nobody(&mut self, bytes: u64) {
        let managed = self.sessions.values().filter_map(|session| session.fixed.get(&FixedKind::Managed));
        let managed = managed.fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let least = self.accounts.baseline.map_or(bytes, |least| least.min(bytes));
        self.accounts.baseline = Some(if managed == 0 { least } else { self.accounts.baseline.unwrap_or(bytes) });
        self.accounts.sees = true;
        self.accounts.looks += 1;
        let explained = least.saturating_add(managed).saturating_add(self.accounts.processes * HIDDEN_BYTES);
        let now = bytes.saturating_sub(explained);
        // Memory that appears in only one poll is being allocated or released.
        let (before, gap) = (std::mem::replace(&mut self.accounts.gap, now), now);
        self.attribute(before.min(gap));
        self.accounts.suspects.retain(|_, Suspect { sure, perhaps }| {
            for looks in [&mut *sure, &mut *perhaps] {
                looks.rotate_right(1);
                looks[0] = 0;
            }
            sum(sure) > 0 || sum(perhaps) > 0
        });
        // Requests that waited for this poll are now either served or rejected.
        self.needs_plan = true;
    }

    /// Charges memory that NVML does not attribute to any process to the tenants whose released memory is missing.
    /// Reduces earlier charges if that memory has become free.
    fn attribute(&mut self, lost: u64) {
        let charged = self.tenants.values().fold(0u64, |sum, tenant| sum.saturating_add(tenant.past.kept));
        if lost < charged {
            for tenant in self.tenants.values_mut() {
                tenant.past.kept = part(tenant.past.kept, lost, charged);
            }
        }
        let rest = lost.saturating_sub(charged);
        let total = |of: fn(&Suspect) -> &[u64]| {
            self.accounts.suspects.values().fold(0u64, |all, suspect| all.saturating_add(sum(of(suspect))))
        };
        let (sure, perhaps) = (total(|suspect| &suspect.sure), total(|suspect| &suspect.perhaps));
        let mut left = rest;
        for (id, suspect) in &mut self.accounts.suspects {
            let Some(tenant) = self.tenants.get_mut(id) else { continue };
            let own = sum(&suspect.sure);
            let more = part(own, rest.min(sure), sure).min(left);
            // Limit the charge to the part that cannot be another tenant's missing memory.
            let own = sum(&suspect.perhaps);
            let others = perhaps.saturating_sub(own);
            let certain = rest.saturating_sub(sure).saturating_sub(others).min(own).min(left - more);
            tenant.past.kept = tenant.past.kept.saturating_add(more).saturating_add(certain);
            left -= more + certain;
            // The tenant is no longer suspected of keeping memory that it is charged for.
            for (looks, charged) in [(&mut suspect.sure, more), (&mut suspect.perhaps, certain)] {
                let own = sum(looks.as_slice());
                looks.iter_mut().for_each(|bytes| *bytes -= part(*bytes, charged, own));
            }
        }
        self.accounts.unexplained = left.saturating_sub(self.config.margin_bytes);
        let tenants: Vec<TenantId> = self.tenants.keys().copied().collect();
        tenants.into_iter().for_each(|id| self.charge(id));
    }

    /// Records memory that a tenant released but that did not become free. `sure` is set if it belonged to chunks that
    /// were released while their programs were connected. Does nothing while NVML or the driver fails.
    pub(super) fn missing(&mut self, tenant: TenantId, sure: bool, bytes: u64) {
        if bytes > 0 && self.accounts.sees && self.tenants.contains_key(&tenant) {
            let suspect = self.accounts.suspects.entry(tenant).or_default();
            let [now, ..] = if sure { &mut suspect.sure } else { &mut suspect.perhaps };
            *now = now.saturating_add(bytes);
        }
    }

    /// Records that NVML or the driver has failed. Until both work again, no memory is charged and no tenant is
    /// suspected.
    pub(super) fn blind(&mut self) {
        self.accounts.sees = false;
        self.accounts.suspects.clear();
        self.accounts.beyond.clear();
        self.needs_plan = true;
    }

    /// Returns true if a tenant would exceed its limit if all recently released memory were still in use. The tenant
    /// waits for the next two polls, which reveal whether this is the case.
    pub(super) fn waits_for_missing(&self, tenant: TenantId) -> bool {
        let Some(Suspect { sure: [last, before, ..], .. }) = self.accounts.suspects.get(&tenant) else { return false };
        let missing = last.saturating_add(*before).div_ceil(self.table.chunk_bytes());
        let has = self.tenants.get(&tenant).map_or(0, |known| known.bodies.len() as u64);
        missing > 0 && self.most(tenant).saturating_sub(has) <= missing
    }

    /// Records that a process has released fixed memory. If a descriptor may keep memory of this kind allocated, the
    /// bytes are recorded as missing.
    pub(super) fn gave_back(&mut self, tenant: TenantId, kind: FixedKind, bytes: u64) {
        if matches!(kind, FixedKind::Shared | FixedKind::Driver) {
            self.missing(tenant, false, bytes);
        }
    }

    /// Removes and returns the tenant of a released card piece, and false if the piece belonged to a program whose
    /// connection is closed.
    pub fn giver_of(&mut self, piece: PieceId) -> Option<(TenantId, bool)> {
        self.pieces.given_up(piece)
    }

    /// Adjusts the number of indices that are reserved for a tenant's memory beyond its account, and logs the excess.
    /// If the tenant exceeds its limit and the settings require it, kills its programs.
    fn charge(&mut self, id: TenantId) {
        let chunk = self.table.chunk_bytes();
        let Some(tenant) = self.tenants.get(&id) else { return };
        let bytes = tenant.past.bytes();
        if bytes == 0 && tenant.past.indices.is_empty() && tenant.past.over == 0 {
            return;
        }
        let wanted = usize::try_from(bytes.div_ceil(chunk)).unwrap_or(usize::MAX);
        let mut over = 0;
        loop {
            let Some(tenant) = self.tenants.get_mut(&id) else { return };
            let has = tenant.past.indices.len();
            if has != wanted && !self.may_work() {
                // The rest is charged or released after the next poll.
                break;
            }
            let Some(tenant) = self.tenants.get_mut(&id) else { return };
            if has > wanted {
                if let Some(index) = tenant.past.indices.pop() {
                    self.release_body(id, index);
                }
            } else if has < wanted {
                match self.place_past(id) {
                    Ok(()) => {}
                    Err(true) => {
                        over = ((wanted - has) as u64).saturating_mul(chunk);
                        break;
                    }
                    // Other tenants' memory fills the card. The excess is charged once card memory becomes free.
                    Err(false) => break,
                }
            } else {
                break;
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.past.over = over;
        }
        self.tell(id);
        if over > 0 && self.config.on_stranger == OnStranger::Kill {
            self.kill_past(id);
        }
    }

    /// Reserves one more index for memory beyond a tenant's account. Returns `Err(true)` if this exceeds the tenant's
    /// limit, or `Err(false)` if it fails for another reason.
    fn place_past(&mut self, id: TenantId) -> Result<(), bool> {
        let index = self.tenants.get(&id).map(|tenant| tenant.indices.lowest()).ok_or(false)?;
        if self.is_full(id) {
            return Err(true);
        }
        self.work(1);
        let address = self.table.guest_address(index);
        match self.try_place(id, address) {
            Ok(_) => {}
            Err(Error::Full { limit: Limit::Quota(_), .. }) => return Err(true),
            Err(_) => return Err(false),
        }
        self.put(id, Body::Fixed, 0);
        if let Some(tenant) = self.tenants.get_mut(&id) {
            tenant.past.indices.push(index);
        }
        Ok(())
    }

    fn tell(&mut self, id: TenantId) {
        let clock = self.clock;
        let Some(tenant) = self.tenants.get_mut(&id) else { return };
        let (bytes, name) = (tenant.past.bytes(), tenant.spec.name.clone());
        if bytes == 0 {
            // Drop an old log line, so that the next excess is logged. Keep a recent log line, because the excess may
            // only be fluctuating.
            tenant.past.told = tenant.past.told.filter(|(_, at)| clock.saturating_sub(*at) < LINES_NS);
            return;
        }
        let is_news =
            |&(told, at): &(u64, u64)| bytes >= told.saturating_mul(2) || clock.saturating_sub(at) >= LINES_NS;
        if !tenant.past.told.as_ref().is_none_or(is_news) {
            return;
        }
        tenant.past.told = Some((bytes, clock));
        let Past { kept, over, .. } = tenant.past;
        let of_it = self.accounts.beyond.iter().filter(|(_, (tenant, .., counts))| *tenant == id && *counts > 0);
        let processes: Vec<_> = of_it.take(8).map(|(pid, (_, program, _, counts))| (*pid, program, *counts)).collect();
        tracing::warn!(
            tenant = name,
            bytes,
            kept,
            over_quota = over,
            ?processes,
            "a tenant has card memory beyond its account and is charged for it"
        );
    }

    /// Kills a tenant's programs that use memory beyond their accounts. If the excess consists only of released memory,
    /// kills all of the tenant's programs.
    fn kill_past(&mut self, id: TenantId) {
        let counts =
            |pid: &u32| self.accounts.beyond.get(pid).is_some_and(|(tenant, .., counts)| *tenant == id && *counts > 0);
        let all: Vec<_> =
            self.sessions_of(id).filter_map(|session| Some((session, self.sessions.get(&session)?.pid))).collect();
        // A process that was just killed may have caused the excess, although its connection is already closed.
        let any = self.tenants.get(&id).is_some_and(|tenant| tenant.past.beyond > 0);
        let sessions: Vec<_> = all.into_iter().filter(|(_, pid)| !any || counts(pid)).collect();
        for (session, pid) in sessions {
            // Ending one connection of a process ends all of its connections.
            if self.sessions.get(&session).is_some_and(|session| !session.stuck) {
                tracing::warn!(tenant = id.0, pid, "killing a program that has memory beyond its tenant's account");
                self.give_up(session, Reason::Memory);
            }
        }
    }

    /// Returns true if card memory is used beyond the accounts, or if released memory is missing.
    pub(super) fn is_past(&self) -> bool {
        let of_tenants = self.tenants.values().any(|tenant| tenant.past.bytes() > 0);
        of_tenants || self.accounts.unexplained > 0 || !self.accounts.suspects.is_empty()
    }

    /// Returns a tenant's processes that use memory beyond their accounts.
    pub(super) fn unaccounted(&self, id: TenantId) -> Vec<Unaccounted> {
        let of_it = self.accounts.beyond.iter().filter(|(_, (tenant, .., counts))| *tenant == id && *counts > 0);
        of_it
            .map(|(&pid, (_, program, _, bytes))| Unaccounted { pid, program: program.clone(), bytes: *bytes })
            .collect()
    }

    /// Returns the number of polls of NVML and the driver so far.
    pub(super) fn looks(&self) -> u64 {
        self.accounts.looks
    }

    /// Returns the used bytes of the card that cannot be charged to any process or tenant.
    pub(super) fn unexplained(&self) -> u64 {
        self.accounts.unexplained
    }
}

/// Returns `of * own / all`, or 0 if `all` is 0.
fn part(own: u64, of: u64, all: u64) -> u64 {
    if all == 0 {
        return 0;
    }
    u64::try_from(u128::from(own) * u128::from(of) / u128::from(all)).unwrap_or(u64::MAX)
}

/// Returns true if NVML attributes memory of this kind to the process that allocated it.
fn is_the_processes(kind: FixedKind) -> bool {
    match kind {
        FixedKind::Array | FixedKind::Shared | FixedKind::Driver => true,
        FixedKind::Managed | FixedKind::Host => false,
    }
}
