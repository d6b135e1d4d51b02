//! The PCI functions in sysfs.

use std::fs;
use std::io;
use std::path::Path;

use crate::modules::DRIVER;

const DEVICES: &str = "/sys/bus/pci/devices";

/// PCI vendor ID of the card.
const VENDOR_NVIDIA: &str = "0x10de";

/// A PCI function in sysfs.
struct Function {
    address: String,
    vendor: String,
    device: String,
    class: String,
    driver: Option<String>,
}

fn functions() -> io::Result<Vec<Function>> {
    let mut addresses: Vec<String> =
        fs::read_dir(DEVICES)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    addresses.sort();
    Ok(addresses.into_iter().map(function).collect())
}

fn function(address: String) -> Function {
    let directory = Path::new(DEVICES).join(&address);
    let word = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default().trim().to_owned();
    let driver = fs::read_link(directory.join("driver")).ok();
    Function {
        vendor: word("vendor"),
        device: word("device"),
        class: word("class"),
        driver: driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())),
        address,
    }
}

/// Returns the addresses of all cards.
pub fn cards() -> io::Result<Vec<String>> {
    let cards = functions()?.into_iter().filter(|function| function.vendor == VENDOR_NVIDIA);
    Ok(cards.map(|function| function.address).collect())
}

/// Returns one line per function and, for cards, one line per nonempty region with its index, first and last address,
/// and flags.
pub fn list() -> io::Result<Vec<String>> {
    let mut lines = Vec::new();
    for Function { address, vendor, device, class, driver } in functions()? {
        let driver = driver.unwrap_or_else(|| "-".to_owned());
        lines.push(format!("{address} {vendor}:{device} class={class} driver={driver}"));
        if vendor == VENDOR_NVIDIA {
            let resources = fs::read_to_string(Path::new(DEVICES).join(&address).join("resource"))?;
            let used = resources.lines().enumerate().filter(|(_, line)| !line.starts_with("0x0000000000000000"));
            lines.extend(used.map(|(index, line)| format!("{address} region{index} {line}")));
        }
    }
    Ok(lines)
}

/// Unbinds the driver from every card.
pub fn unbind() -> io::Result<()> {
    to_each_card("unbind")
}

/// Binds every card to the driver.
pub fn bind() -> io::Result<()> {
    to_each_card("bind")
}

fn to_each_card(action: &str) -> io::Result<()> {
    let cards = cards()?;
    if cards.is_empty() {
        return Err(io::Error::other("no PCI function of vendor 10de"));
    }
    for card in cards {
        let path = format!("/sys/bus/pci/drivers/{DRIVER}/{action}");
        fs::write(&path, &card).map_err(|error| io::Error::new(error.kind(), format!("{path} {card}: {error}")))?;
    }
    Ok(())
}

/// Makes the kernel rescan all PCI buses.
pub fn rescan() -> io::Result<()> {
    fs::write("/sys/bus/pci/rescan", "1")
}
