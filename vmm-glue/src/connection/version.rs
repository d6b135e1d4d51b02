//! Version and capability negotiation.

use serde_json::{Map, Value};
use zerocopy::FromBytes;

use super::MAX_FDS;
use crate::protocol::{VERSION_MAJOR, VERSION_MINOR, Version};
use vmm_memory::memory::PAGE_SIZE;

/// Maximum size of a parsed capabilities string in bytes. QEMU's string is shorter than 300 bytes.
const MAX_TEXT: usize = 4096;
/// Default limit on the size of the data in one message, in bytes.
const DEFAULT_TRANSFER: u64 = 1 << 20;

/// Properties of a client, known after negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    pub minor: u16,
    /// Maximum size of the data in one message that the client accepts, in bytes.
    pub max_transfer: usize,
    /// True if the client accepts file descriptors in messages.
    pub takes_fds: bool,
    /// True if the client follows the specification: it accepts server requests, and error replies without a body.
    ///
    /// The client of the `vfio-user` crate (cloud-hypervisor) does neither: it interprets the following bytes as the
    /// full reply. The server recognizes this client by the capabilities that it omits.
    pub complete: bool,
}

/// Validates the version and capabilities proposed by a client. Returns the client's properties and the NUL-terminated
/// text of the reply.
pub(super) fn negotiate(body: &[u8], max_transfer: usize, max_maps: usize) -> Result<(Peer, Vec<u8>), String> {
    let (version, text) = Version::read_from_prefix(body).map_err(|_| "the message is truncated".to_owned())?;
    if version.major != VERSION_MAJOR {
        return Err(format!(
            "the client proposes version {}.{}, but this server supports {VERSION_MAJOR}.{VERSION_MINOR}",
            version.major, version.minor
        ));
    }
    let proposed = capabilities(text)?;
    let number = |name: &str, default: u64| match proposed.get(name) {
        None => Ok(default),
        Some(value) => value.as_u64().ok_or_else(|| format!("capability {name} is {value}, not a number")),
    };
    let their_transfer = number("max_data_xfer_size", DEFAULT_TRANSFER)?;
    let takes_fds = number("max_msg_fds", 1)? != 0;
    let known = |name: &str| proposed.contains_key(name);
    let peer = Peer {
        minor: version.minor.min(VERSION_MINOR),
        max_transfer: usize::try_from(their_transfer).unwrap_or(usize::MAX).min(max_transfer),
        takes_fds,
        complete: ["write_multiple", "pgsizes", "max_dma_maps", "twin_socket"].into_iter().any(known),
    };

    let mut ours = Map::new();
    ours.insert("max_msg_fds".into(), MAX_FDS.into());
    ours.insert("max_data_xfer_size".into(), max_transfer.into());
    // Include other capabilities only if the client proposed them.
    if known("max_dma_maps") {
        let theirs = number("max_dma_maps", u64::MAX)?;
        ours.insert("max_dma_maps".into(), theirs.min(u64::try_from(max_maps).unwrap_or(u64::MAX)).into());
    }
    if known("pgsizes") {
        ours.insert("pgsizes".into(), PAGE_SIZE.into());
    }
    if proposed.get("write_multiple") == Some(&Value::Bool(true)) {
        ours.insert("write_multiple".into(), true.into());
    }
    let mut text = Value::Object(Map::from_iter([("capabilities".to_owned(), Value::Object(ours))])).to_string();
    text.push('\0');
    Ok((peer, text.into_bytes()))
}

fn capabilities(text: &[u8]) -> Result<Map<String, Value>, String> {
    if text.is_empty() {
        return Ok(Map::new());
    }
    if text.len() > MAX_TEXT {
        return Err(format!("capabilities of {} bytes; the maximum is {MAX_TEXT}", text.len()));
    }
    let text = text.strip_suffix(b"\0").ok_or("the capabilities are not NUL-terminated")?;
    let value: Value =
        serde_json::from_slice(text).map_err(|error| format!("the capabilities are not JSON: {error}"))?;
    let Value::Object(mut members) = value else { return Err("the capabilities are not a JSON object".into()) };
    match members.remove("capabilities") {
        None => Ok(Map::new()),
        Some(Value::Object(capabilities)) => Ok(capabilities),
        Some(_) => Err("the member `capabilities` is not an object".into()),
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    fn propose(major: u16, minor: u16, text: &str) -> Result<(Peer, Value), String> {
        let body = [Version { major, minor }.as_bytes(), text.as_bytes()].concat();
        let (peer, reply) = negotiate(&body, 65536, 100)?;
        let (last, json) = reply.split_last().unwrap();
        assert_eq!(*last, 0);
        Ok((peer, serde_json::from_slice(json).unwrap()))
    }

    #[test]
    fn qemu_gets_supported_part_of_its_proposal() {
        let text = "{\"capabilities\": {\"migration\": {\"pgsize\": 4096, \"max_bitmap_size\": 268435456}, \
                    \"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \"pgsizes\": 4096, \"max_dma_maps\": 65535, \
                    \"write_multiple\": true}}\0";
        let (peer, reply) = propose(0, 0, text).unwrap();
        assert_eq!(peer, Peer { minor: 0, max_transfer: 65536, takes_fds: true, complete: true });
        let expected = serde_json::json!({"capabilities": {"max_msg_fds": 16, "max_data_xfer_size": 65536,
            "max_dma_maps": 100, "pgsizes": 4096, "write_multiple": true}});
        assert_eq!(reply, expected);
    }

    #[test]
    fn cloud_hypervisor_is_detected_by_missing_capabilities() {
        let text =
            "{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576,\"migration\":{\"pgsize\":4096}}}\0";
        let (peer, reply) = propose(0, 1, text).unwrap();
        assert_eq!(peer, Peer { minor: 1, max_transfer: 65536, takes_fds: true, complete: false });
        assert_eq!(reply, serde_json::json!({"capabilities": {"max_msg_fds": 16, "max_data_xfer_size": 65536}}));
    }

    #[test]
    fn capabilities_may_be_missing() {
        assert!(propose(0, 0, "").is_ok());
        assert!(propose(0, 0, "{}\0").is_ok());
    }

    #[test]
    fn smaller_transfers_of_the_client_are_respected() {
        let (peer, _) = propose(0, 0, "{\"capabilities\":{\"max_data_xfer_size\":512}}\0").unwrap();
        assert_eq!(peer.max_transfer, 512);
    }

    #[test]
    fn client_may_say_that_it_takes_no_descriptors() {
        let (peer, _) = propose(0, 0, "{\"capabilities\":{\"max_msg_fds\":0}}\0").unwrap();
        assert!(!peer.takes_fds);
        assert!(propose(0, 0, "").unwrap().0.takes_fds, "the default is one");
    }

    #[test]
    fn bad_proposals_are_refused_with_the_reason() {
        fn refused(major: u16, text: &str) -> String {
            propose(major, 0, text).unwrap_err()
        }
        assert!(refused(1, "{}\0").contains("1.0"));
        assert!(refused(0, "{}").contains("NUL"));
        assert!(refused(0, "{\0").contains("JSON"));
        assert!(refused(0, "[]\0").contains("object"));
        assert!(refused(0, "{\"capabilities\":1}\0").contains("object"));
        assert!(refused(0, "{\"capabilities\":{\"max_data_xfer_size\":\"big\"}}\0").contains("max_data_xfer_size"));
        assert!(refused(0, &format!("{}\0", "[".repeat(3000))).contains("JSON"));
        assert!(refused(0, &" ".repeat(5000)).contains("5000"));
        assert!(negotiate(&[0; 3], 4096, 1).is_err());
    }
}
