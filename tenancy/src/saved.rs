//! The saved state of a card's division among tenants, for the card's next owner.
//!
//! Both kinds of cards save [`SavedTenancy`] with the same parts: the scheduler (accounts, the policy's credits,
//! strikes, quarantines) and the memory quanta. The parts are those of version 0.2.0.
//!
//! The owner of a CUDA card saves [`SavedAccounts`], which consist of these parts and the tenants' names. The next
//! owner needs the names, because it assigns new numbers to the tenants. Turns, moves, and chunks are not saved. The
//! programs continue without the owner, and report their chunks to the next one.

use crate::Residency;
use saved_state::{Invalid, Known, Part as _, ReadError, SavedState, WriteError, Writer, ascend, first_version};
use sched::{Nanos, SavedScheduler, Scheduler};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use vram::{Quanta, SavedQuanta, TenantId};

/// Owner number of the parts in a file of accounts.
const CARD: u32 = 0;

/// Highest tenant number. Higher numbers are those of groups.
const NUMBER_MAX: u32 = u32::MAX >> 1;

/// Saved division of a card's time and memory quanta among its tenants.
#[derive(Clone, Debug)]
pub struct SavedTenancy {
    /// Accounts, credits, strikes and quarantines of the scheduler.
    pub scheduler: SavedScheduler,
    /// Memory quanta.
    pub quanta: SavedQuanta,
}

impl SavedTenancy {
    /// Saves a card's division among tenants.
    #[must_use]
    pub fn new(scheduler: &Scheduler, residency: &Residency) -> Self {
        Self { scheduler: scheduler.save(), quanta: residency.quanta().save() }
    }

    /// Returns the parts, each with the versions that this code can read.
    #[must_use]
    pub fn known() -> [Known; 2] {
        [Known::for_part::<SavedQuanta>(), Known::for_part::<SavedScheduler>()]
    }

    /// Appends the parts to a file.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the parts cannot be written.
    pub fn write(&self, file: &mut Writer, owner: u32) -> Result<(), WriteError> {
        let Self { scheduler, quanta } = self;
        file.put(owner, quanta)?;
        file.put(owner, scheduler)
    }

    /// Reads the parts from a file.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the parts cannot be read.
    pub fn read(file: &mut SavedState<'_>, owner: u32) -> Result<Self, ReadError> {
        Ok(Self { quanta: file.take(owner)?, scheduler: file.take(owner)? })
    }

    /// Restores the scheduler and the quanta at time `now` on the owner's clock.
    ///
    /// # Errors
    /// Returns an error if the saved state is invalid, or if it was saved after `now`.
    pub fn restored(self, now: Nanos) -> Result<(Scheduler, Quanta), Invalid> {
        Ok((Scheduler::restored(self.scheduler, now)?, Quanta::try_from(self.quanta)?))
    }
}

/// The tenants of [`SavedAccounts`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedTenants {
    /// Time on the owner's clock at which the accounts were saved, in ns.
    clock_ns: u64,
    /// Number of memory quanta that have begun.
    begun: u64,
    /// Numbers and names of the tenants, sorted by number.
    names: Vec<(u32, String)>,
}

first_version!(SavedTenants, "tenancy.tenants");

/// Saved accounts of tenants. The next owner of the card identifies the tenants by their names.
#[derive(Clone, Debug)]
pub struct SavedAccounts {
    tenants: SavedTenants,
    tenancy: SavedTenancy,
}

/// Accounts of an earlier owner's tenants.
#[derive(Debug)]
pub struct RestoredAccounts {
    /// Time on the earlier owner's clock at which the accounts were saved, in ns.
    pub clock_ns: u64,
    /// Numbers of the tenants, by name.
    pub names: BTreeMap<String, TenantId>,
    /// Scheduler with the accounts.
    pub scheduler: Scheduler,
    /// Memory quanta.
    pub quanta: Quanta,
    /// Number of memory quanta that have begun.
    pub begun: u64,
}

impl SavedAccounts {
    /// Saves the accounts of a card at `now`. `scheduler` must have no work (see [`sched::turns::Turns::at_rest`]).
    #[must_use]
    pub fn new(
        now: u64,
        names: impl Iterator<Item = (TenantId, String)>,
        scheduler: &Scheduler,
        residency: &Residency,
    ) -> Self {
        let names = names.map(|(tenant, name)| (tenant.0, name)).collect();
        let tenants = SavedTenants { clock_ns: now, begun: residency.begun(), names };
        Self { tenants, tenancy: SavedTenancy::new(scheduler, residency) }
    }

    /// Returns the accounts as a file with a unique `identity`.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if a part cannot be written.
    pub fn to_file(&self, identity: [u8; 16]) -> Result<Vec<u8>, WriteError> {
        let mut file = Writer::new(identity);
        file.put(CARD, &self.tenants)?;
        self.tenancy.write(&mut file, CARD)?;
        Ok(file.finish())
    }

    /// Reads the parts of a file.
    fn from_file(file: &[u8]) -> Result<Self, ReadError> {
        let known: Vec<Known> = SavedTenancy::known().into_iter().chain([Known::for_part::<SavedTenants>()]).collect();
        let mut file = SavedState::parse(file, &known)?;
        let saved = Self { tenants: file.take(CARD)?, tenancy: SavedTenancy::read(&mut file, CARD)? };
        file.finish()?;
        Ok(saved)
    }

    fn restored(self) -> Result<RestoredAccounts, Invalid> {
        let SavedTenants { clock_ns, begun, names } = self.tenants;
        let (scheduler, quanta) = self.tenancy.restored(Nanos(clock_ns))?;
        Invalid::unless(ascend(names.iter().map(|(tenant, _)| tenant)), || "the tenants are not in order".into())?;
        Invalid::unless(names.iter().all(|(tenant, _)| *tenant <= NUMBER_MAX), || "a number is too large".into())?;
        let own = scheduler.vgpus().map(|tenant| tenant.0).eq(names.iter().map(|(tenant, _)| *tenant));
        Invalid::unless(own, || "the accounts are of other tenants".into())?;
        Invalid::unless(scheduler.tickets().next().is_none(), || "the accounts contain work".into())?;
        let count = names.len();
        let names: BTreeMap<_, _> = names.into_iter().map(|(tenant, name)| (name, TenantId(tenant))).collect();
        Invalid::unless(names.len() == count, || "two tenants have the same name".into())?;
        Ok(RestoredAccounts { clock_ns, names, scheduler, quanta, begun })
    }
}

impl RestoredAccounts {
    /// Restores the accounts from a file.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the file is damaged, has parts of unsupported versions, or contains accounts other
    /// than those of the named tenants.
    pub fn from_file(file: &[u8]) -> Result<Self, ReadError> {
        let invalid = |why| ReadError::Invalid { name: SavedTenants::NAME, of: CARD, why };
        SavedAccounts::from_file(file)?.restored().map_err(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sched::{Config, Event, VgpuParams};
    use vram::QuantaConfig;

    const IDENTITY: [u8; 16] = *b"accounts, tested";
    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(4);

    /// Returns accounts of two tenants. The first one has a strike.
    fn card() -> (Scheduler, Residency) {
        let mut scheduler = Scheduler::new(Config::default(), Nanos(0)).expect("defaults");
        for vgpu in [ONE, TWO] {
            scheduler.event(Nanos(0), Event::Added { vgpu, params: VgpuParams::default() }, &mut Vec::new());
        }
        scheduler.event(Nanos(5), Event::Struck { vgpu: ONE, engine: sched::Engine::Compute }, &mut Vec::new());
        let mut residency = Residency::new(vram::balance::Config::default(), QuantaConfig::default());
        residency.moved(5, 1 << 30, 1 << 30);
        (scheduler, residency)
    }

    fn names() -> [(TenantId, String); 2] {
        [(ONE, "one".to_owned()), (TWO, "two".to_owned())]
    }

    /// Returns the reason why accounts of these tenants are rejected.
    fn refused(names: &[(TenantId, &str)]) -> String {
        let (scheduler, residency) = card();
        let names = names.iter().map(|(tenant, name)| (*tenant, (*name).to_owned()));
        SavedAccounts::new(9, names, &scheduler, &residency).restored().expect_err("they differ").to_string()
    }

    #[test]
    fn accounts_continue_after_a_file() {
        let (scheduler, residency) = card();
        let file = SavedAccounts::new(9, names().into_iter(), &scheduler, &residency).to_file(IDENTITY).expect("small");
        let restored = RestoredAccounts::from_file(&file).expect("valid");
        assert_eq!((restored.clock_ns, restored.names["two"]), (9, TWO));
        assert_eq!(restored.scheduler.strikes(ONE), scheduler.strikes(ONE));
        let mut next = Residency::new(vram::balance::Config::default(), QuantaConfig::default());
        next.continue_from(restored.quanta, restored.begun);
        assert_eq!(next.quanta().bandwidth(), residency.quanta().bandwidth());
        assert!(next.quanta().bandwidth() > 0);
    }

    #[test]
    fn accounts_of_other_tenants_are_refused() {
        assert!(refused(&[(ONE, "one")]).contains("of other tenants"));
        assert!(refused(&[(TWO, "two"), (ONE, "one")]).contains("not in order"));
        assert!(refused(&[(ONE, "one"), (TWO, "one")]).contains("the same name"));
    }

    #[test]
    fn damaged_files_are_refused() {
        let (scheduler, residency) = card();
        let file = SavedAccounts::new(9, names().into_iter(), &scheduler, &residency).to_file(IDENTITY).expect("small");
        for at in 0..file.len() {
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            assert!(RestoredAccounts::from_file(&damaged).is_err(), "byte {at}");
            assert!(RestoredAccounts::from_file(&file[..at]).is_err(), "{at} bytes");
        }
    }

    /// The parts that version 0.2.0 reads and writes, with their versions.
    const EARLIER: [(&str, u32); 2] = [("vram.quanta", 2), ("sched", 2)];

    #[test]
    fn earlier_version_reads_and_writes_these_parts() {
        let (scheduler, residency) = card();
        let known = EARLIER.map(|(name, version)| Known { name: name.to_owned(), version });
        let mut file = Writer::for_reader(IDENTITY, known.to_vec());
        SavedTenancy::new(&scheduler, &residency).write(&mut file, 7).expect("both parts are known");
        let file = file.finish();
        let mut parsed = SavedState::parse(&file, &known).expect("no other part");
        let quanta: SavedQuanta = parsed.take(7).expect("quanta");
        let saved: SavedScheduler = parsed.take(7).expect("a scheduler");
        parsed.finish().expect("no more");
        // The earlier version writes each part separately.
        let mut file = Writer::new(IDENTITY);
        file.put(7, &saved).expect("a part");
        file.put(7, &quanta).expect("a part");
        let file = file.finish();
        let mut parsed = SavedState::parse(&file, &SavedTenancy::known()).expect("known versions");
        let (again, quanta) = SavedTenancy::read(&mut parsed, 7).expect("both").restored(Nanos(9)).expect("valid");
        assert_eq!(again.strikes(ONE), scheduler.strikes(ONE));
        assert_eq!(quanta.bandwidth(), residency.quanta().bandwidth());
    }
}
