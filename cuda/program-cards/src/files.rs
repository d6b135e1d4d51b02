//! The cards whose device files a program can reach.
//!
//! NVIDIA's kernel driver lists its cards in `/proc/driver/nvidia/gpus`, each with its UUID and the number of its
//! device file `/dev/nvidiaN`. A container with some of the device files has either all entries or only those of its
//! cards. If the driver's library cannot open a card in the list of visible cards, it ignores this entry and all later
//! ones.

use std::path::Path;

/// Folder in which the kernel driver lists its cards.
pub const CARDS: &str = "/proc/driver/nvidia/gpus";
/// Folder of device files.
pub const DEVICES: &str = "/dev";

/// A card in the kernel driver's list.
struct Entry {
    uuid: String,
    device: String,
}

fn entry(text: &str) -> Option<Entry> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
        line.map(|value| value.trim().to_lowercase())
    };
    Some(Entry { uuid: field("GPU UUID")?.replace('-', ""), device: format!("nvidia{}", field("Device Minor")?) })
}

/// Returns those of `cards` whose device files exist. Returns all cards if a UUID is missing from the kernel driver's
/// list, because the kernel driver knows a card's UUID only after the card's first use.
#[must_use]
pub fn reachable(cards: &[[u8; 16]], listed: &Path, devices: &Path) -> Vec<[u8; 16]> {
    let files = std::fs::read_dir(listed).into_iter().flatten().flatten();
    let read = |file: std::fs::DirEntry| std::fs::read_to_string(file.path().join("information")).ok();
    let entries: Option<Vec<Entry>> =
        files.map(|file| entry(&read(file)?).filter(|known| !known.uuid.contains('?'))).collect();
    let Some(entries) = entries.filter(|entries| !entries.is_empty()) else { return cards.to_vec() };
    let is_reachable = |card: &&[u8; 16]| {
        let uuid = card.iter().fold("gpu".to_owned(), |text, byte| format!("{text}{byte:02x}"));
        entries.iter().any(|known| known.uuid == uuid && devices.join(&known.device).exists())
    };
    cards.iter().filter(is_reachable).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the kernel driver's entry for a card.
    fn write(folder: &Path, minor: u32, uuid: &str) {
        let at = folder.join("gpus").join(format!("0000:{minor:02x}:00.0"));
        std::fs::create_dir_all(&at).expect("a folder");
        let text = format!(
            "Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??.??\nDevice Minor: \t {minor}\n"
        );
        std::fs::write(at.join("information"), text).expect("written");
    }

    #[test]
    fn cards_without_a_device_file_or_an_entry_are_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let (gpus, devices) = (folder.path().join("gpus"), folder.path().join("dev"));
        let cards = [[0x11; 16], [0x2a; 16], [0x33; 16]];
        assert_eq!(reachable(&cards, &gpus, &devices), cards, "the kernel driver has no list");
        std::fs::create_dir(&devices).expect("a folder");
        write(folder.path(), 0, "GPU-11111111-1111-1111-1111-111111111111");
        write(folder.path(), 1, "GPU-2A2A2A2A-2a2a-2a2a-2a2a-2a2a2a2a2a2a");
        std::fs::write(devices.join("nvidia0"), "").expect("written");
        assert_eq!(reachable(&cards, &gpus, &devices), [[0x11; 16]]);
        std::fs::write(devices.join("nvidia1"), "").expect("written");
        assert_eq!(reachable(&cards, &gpus, &devices), [[0x11; 16], [0x2a; 16]]);
        write(folder.path(), 2, "GPU-????????-????-????-????-????????????");
        assert_eq!(reachable(&cards, &gpus, &devices), cards, "an unknown UUID may be any card's");
        std::fs::write(gpus.join("0000:02:00.0/information"), "nonsense").expect("written");
        assert_eq!(reachable(&cards, &gpus, &devices), cards);
    }
}
