//! Resolves users and groups, by name or ID, for the ownership of sockets.

use nix::unistd::{Group, User};
use vmm_glue::socket::SocketOptions;

use config::SocketMode;

/// A user or group that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("there is no {what} `{name}` on this host")]
pub struct NoAccount {
    what: &'static str,
    name: String,
}

/// Returns the options for a socket, with user and group names resolved on this host.
///
/// # Errors
/// Returns an error if the user or group does not exist.
pub fn socket_options(mode: SocketMode, owner: Option<&str>, group: Option<&str>) -> Result<SocketOptions, NoAccount> {
    let user = |name: &str| User::from_name(name).ok().flatten().map(|user| user.uid.as_raw());
    let members = |name: &str| Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw());
    Ok(SocketOptions {
        mode: Some(mode.0),
        uid: owner.map(|name| number("user", name, user)).transpose()?,
        gid: group.map(|name| number("group", name, members)).transpose()?,
    })
}

fn number(what: &'static str, name: &str, find: impl Fn(&str) -> Option<u32>) -> Result<u32, NoAccount> {
    // `u32::MAX` means "do not change" to the kernel.
    let plain = name.parse().ok().filter(|&number| number != u32::MAX);
    plain.or_else(|| find(name)).ok_or_else(|| NoAccount { what, name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_options_accept_names_and_ids_and_reject_unknown_group() {
        let options = socket_options(SocketMode(0o600), Some("root"), Some("7")).unwrap();
        assert_eq!(options, SocketOptions { mode: Some(0o600), uid: Some(0), gid: Some(7) });
        let error = socket_options(SocketMode(0o600), None, Some("no-such-group")).unwrap_err();
        assert_eq!(error.to_string(), "there is no group `no-such-group` on this host");
    }
}
