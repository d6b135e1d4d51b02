//! A daemon's resources as seen by the daemon itself, by the kernel, and by a VM that uses all of them.

use std::fmt;
use std::fs;

use config::VmSpec;
use mediatorctl::client::Client;
use rig::driver::Driver;
use rig::{CHUNK, Machine, RemoteGuest};

use crate::CARD_MIB;
use crate::holdings::{Holdings, Slack};
use crate::support::Place;

/// Permitted growth of the daemon's resource usage, regardless of how many VMs have existed. The heap retains memory,
/// and the log's rate limiter has an entry for each known VM (up to 4096).
const SLACK: Slack = Slack { mappings: 8, resident_kib: 8192, pools: &["admin-work", "simgpu-sm"] };

/// Resource usage of a daemon without VMs.
pub struct Ledger {
    card: api::Card,
    /// Names of the files in the socket directory.
    files: Vec<String>,
    holdings: Holdings,
}

impl Ledger {
    /// Reads the daemon's resource usage: first the process state, because the connection to the API uses a descriptor.
    pub fn read(place: &Place, pid: u32) -> Self {
        let holdings = Holdings::for_process(pid, CARD_MIB << 10).unwrap();
        let card: api::Card = Client::new(place.path("admin.sock")).unwrap().get("/v1/cards/card0").unwrap();
        let names = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name());
        let mut files: Vec<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        files.sort();
        Self { card, files, holdings }
    }

    /// Returns descriptions of the differences between this ledger and `later`.
    pub fn lost(&self, later: &Self) -> Vec<String> {
        let mut lost = self.holdings.lost(&later.holdings, SLACK);
        if self.card != later.card {
            lost.push(format!("of the card: {:?}, was {:?}", later.card, self.card));
        }
        if self.files != later.files {
            lost.push(format!("files: {:?}, were {:?}", later.files, self.files));
        }
        lost
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let api::Card { channels_used, vram_free_mib, vram_placed_mib, vram_mediator_mib, .. } = &self.card;
        write!(
            f,
            "{channels_used} channels, VRAM free {vram_free_mib} MiB, placed {vram_placed_mib}, of the mediator \
             {vram_mediator_mib}; {}",
            self.holdings
        )
    }
}

/// Adds a VM that is entitled to all of the card's resources, and uses all of them. Fails if a resource has leaked.
pub fn audit(place: &Place) {
    const NAME: &str = "audit";
    let admin = Client::new(place.path("admin.sock")).unwrap();
    let card: api::Card = admin.get("/v1/cards/card0").unwrap();
    assert_eq!((card.vms.len(), card.channels_used, card.vram_placed_mib, card.vram_assigned_mib), (0, 0, 0, 0));
    let spec = VmSpec { channels: Some(card.channels), ..VmSpec::new(NAME, "card0", card.vram_free_mib) };
    let _: api::Vm = admin.post("/v1/vms", &spec).unwrap();
    let socket = place.path("audit.sock");
    let bytes = card.vram_free_mib << 20;
    let mut guest = RemoteGuest::connect(&socket, bytes).unwrap();
    for at in (0..bytes).step_by(CHUNK as usize) {
        assert_eq!(guest.peek(at), 0, "free VRAM at {at:#x}");
        guest.poke(at, at as u32 | 1);
    }
    for at in (0..bytes).step_by(CHUNK as usize) {
        assert_eq!(guest.peek(at), at as u32 | 1, "free VRAM at {at:#x}");
        guest.poke(at, 0);
    }
    let mut driver = Driver::new(guest);
    for id in 0..card.channels {
        let channel = driver.prepare(u8::try_from(id).unwrap());
        driver.bind(&channel);
    }
    assert!(driver.guest.settle());
    let all: api::Card = admin.get("/v1/cards/card0").unwrap();
    assert_eq!(all.channels_used, card.channels, "available channels");
    assert_eq!(all.vram_placed_mib, card.vram_free_mib, "available VRAM");
    driver.guest.leave();
    admin.delete("/v1/vms/audit").unwrap();
    assert!(!socket.exists());
}
