//! The page that shows cards, tenants and VMs in a browser, and the TCP socket that serves it.
//!
//! The page is a single file, `page.html`. It reads the admin API with GET requests, changes nothing, and sends no
//! requests to other hosts. Names chosen by tenants are shown as text, never as HTML.
//!
//! Browsers connect to a loopback address without a password, so the crate limits which websites can access the daemon
//! through the browser:
//!
//! - A website may resolve its own name to a loopback address and then read the responses ("DNS rebinding"). Therefore,
//!   requests whose `Host` is neither an IP address nor `localhost` are rejected.
//! - Other websites cannot embed or read the page, because the headers forbid frames, other sources, and cross-origin
//!   use.
//!
//! The crate does not depend on the API; the daemon passes its router.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use sha2::{Digest, Sha256};

/// HTML source of the page.
const PAGE: &str = include_str!("page.html");
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// Adds the page at `/` to a router of read-only requests, together with headers that secure the page.
pub fn with_page(api: Router) -> Router {
    let policy = policy();
    let page = get(move || async move { ([(header::CONTENT_SECURITY_POLICY, policy)], Html(PAGE)) });
    api.route("/", page).layer(from_fn(async |request: Request, next: Next| {
        let mut answer = next.run(request).await;
        for (name, value) in HEADERS {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        answer
    }))
}

/// Rejects requests whose `Host` is neither an IP address nor `localhost`; see the crate documentation.
pub fn guard(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        if host.is_some_and(is_local_host) { next.run(request).await } else { refused(host).into_response() }
    }))
}

/// Headers of all responses.
const HEADERS: [(HeaderName, &str); 5] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Returns the page's content security policy: the page may run its own script, use its own style, and send requests to
/// its own server.
fn policy() -> String {
    let hash = |tag: &str| {
        let text = PAGE.split(&format!("<{tag}>")).nth(1).and_then(|rest| rest.split(&format!("</{tag}>")).next());
        base64::engine::general_purpose::STANDARD.encode(Sha256::digest(text.unwrap_or_default()))
    };
    format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; form-action \
         'none'; frame-ancestors 'none'",
        hash("script"),
        hash("style")
    )
}

/// Returns true for an IP address or `localhost`, with or without a port.
fn is_local_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

fn refused(host: Option<&str>) -> Response {
    let host = host.unwrap_or_default();
    let text = format!(
        "the page is not served for the host `{host}`: use the address of `page` in the daemon's configuration, or a proxy to \
         the read-only socket\n"
    );
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

/// Listens on a loopback address. A daemon that takes over during an upgrade can listen before its predecessor has
/// closed the same address.
///
/// # Errors
/// Returns an error if the system rejects the address, for example because another program is using it.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_with_foreign_names_are_not_local() {
        for local in ["127.0.0.1:9470", "127.0.0.1", "[::1]:9470", "localhost:9470", "LOCALHOST", "10.0.0.4:80"] {
            assert!(is_local_host(local), "{local}");
        }
        for foreign in
            ["", "example.org", "localhost.example.org:9470", "127.0.0.1.example.org", "[example]:1", "a:b@localhost"]
        {
            assert!(!is_local_host(foreign), "{foreign}");
        }
    }

    #[test]
    fn page_has_one_script_one_style_and_no_foreign_address() {
        for tag in ["<script>", "<style>"] {
            assert_eq!(PAGE.matches(tag).count(), 1, "{tag}");
        }
        // The SVG namespace is a name, not an address that browsers request.
        let text = PAGE.replace("http://www.w3.org/2000/svg", "");
        for foreign in [
            "http:",
            "https:",
            "src=",
            "href=",
            "url(",
            "@import",
            "innerHTML",
            "insertAdjacentHTML",
            "style=",
            " onclick",
        ] {
            assert!(!text.contains(foreign), "{foreign}");
        }
        let policy = policy();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    }

    #[test]
    fn second_listener_of_an_upgrade_gets_the_same_address() {
        let first = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = first.local_addr().unwrap();
        assert_eq!(listen(address).unwrap().local_addr().unwrap(), address);
        // A program that does not share its address prevents the page from listening on it.
        let alone = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        assert!(listen(alone.local_addr().unwrap()).is_err());
    }
}
