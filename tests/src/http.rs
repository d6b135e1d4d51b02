//! A minimal HTTP client for programs on this host.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail};

/// Sends a request over the new connection `stream`. Returns the status and the body.
///
/// # Errors
/// Returns an error if the connection fails, or the response is malformed.
pub fn request(mut stream: impl Read + Write, method: &str, path: &str) -> Result<(u16, String)> {
    // An HTTP/1.0 response is not chunked, and ends when the connection is closed.
    let head = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
    let mut answer = String::new();
    let asked = stream.write_all(head.as_bytes()).and_then(|()| stream.read_to_string(&mut answer));
    asked.with_context(|| format!("{method} {path}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("{method} {path}: {answer}"))?, body.to_owned()))
}

/// Returns the body of the response to `GET path`.
///
/// # Errors
/// Returns the same errors as [`request`], or an error if the status is not 200.
pub fn get(stream: impl Read + Write, path: &str) -> Result<String> {
    match request(stream, "GET", path)? {
        (200, body) => Ok(body),
        (status, body) => bail!("GET {path}: {status}\n{body}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// A server with a fixed response.
    struct Canned(Cursor<&'static str>, Vec<u8>);

    impl Read for Canned {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            assert!(self.1.ends_with(b"\r\n\r\n"), "asked first");
            self.0.read(buffer)
        }
    }

    impl Write for Canned {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            self.1.write(data)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn canned(answer: &'static str) -> Canned {
        Canned(Cursor::new(answer), Vec::new())
    }

    #[test]
    fn answers_are_split_into_status_and_body() {
        let good = "HTTP/1.1 200 OK\r\nA: b\r\n\r\none\r\n\r\ntwo";
        assert_eq!(request(canned(good), "GET", "/").unwrap(), (200, "one\r\n\r\ntwo".to_owned()));
        assert_eq!(get(canned(good), "/").unwrap(), "one\r\n\r\ntwo");
        let refused = get(canned("HTTP/1.1 404 Not Found\r\n\r\nnothing"), "/x").unwrap_err().to_string();
        assert!(refused.contains("GET /x: 404") && refused.contains("nothing"), "{refused}");
        assert!(request(canned("what?"), "POST", "/y").unwrap_err().to_string().contains("POST /y"));
    }
}
