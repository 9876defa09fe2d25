//! Who a request comes from, as far as the browser tells, before anything else is asked.
//!
//! A page of another site can make a browser send requests here: with forms, images, event streams and WebSockets,
//! and, by giving its own name our address for a moment, as if they were its own. None of it gets further than this file.

use axum::http::{HeaderMap, Method, StatusCode, header};
use hearth_fault::Fault;

/// Names that stand for this host on loopback.
const LOOPBACK: [&str; 2] = ["localhost", "[::1]"];

/// Lets a request through that our own page, or no page at all, sends.
pub(crate) fn check(
    method: &Method,
    headers: &HeaderMap,
    api: bool,
    secure: bool,
) -> Result<(), (StatusCode, Fault)> {
    let text = |name: header::HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
    let host = text(header::HOST).unwrap_or_default();
    // With TLS a name that is not ours does not fit the certificate; without, only loopback is served.
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let number = name.parse::<std::net::Ipv4Addr>();
    let ours = LOOPBACK.contains(&name) || number.is_ok_and(|ip| ip.is_loopback());
    if !secure && !ours {
        return Err((
            StatusCode::MISDIRECTED_REQUEST,
            Fault::new(
                "this console is not known by that name",
                "use the address that hearth console open prints",
            ),
        ));
    }
    let elsewhere = || {
        (
            StatusCode::FORBIDDEN,
            Fault::new(
                "this request comes from another site",
                "open the console itself",
            ),
        )
    };
    if headers.contains_key(header::UPGRADE) {
        return Err(elsewhere());
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let scheme = if secure { "https" } else { "http" };
        if origin.as_bytes() != format!("{scheme}://{host}").as_bytes() {
            return Err(elsewhere());
        }
    }
    if let Some(site) = text(header::HeaderName::from_static("sec-fetch-site")) {
        // A link to the page may be anywhere; what is in it may not be asked for from there.
        let link = !api && *method == Method::GET && site != "same-origin";
        if site != "same-origin" && site != "none" && !link {
            return Err(elsewhere());
        }
    }
    Ok(())
}

/// The value of a cookie.
pub(crate) fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let all = headers.get_all(header::COOKIE).iter();
    all.filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find_map(|(key, value)| (key == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(method: Method, api: bool, secure: bool, given: &[(&'static str, &str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            headers.insert(*name, value.parse().unwrap());
        }
        check(&method, &headers, api, secure).is_ok()
    }

    #[test]
    fn other_names_for_loopback_are_refused() {
        let host = |host| asked(Method::GET, false, false, &[("host", host)]);
        for good in [
            "localhost:8477",
            "127.0.0.1:8477",
            "[::1]:8477",
            "localhost",
            "127.1.2.3:80",
        ] {
            assert!(host(good), "{good}");
        }
        for bad in [
            "evil.example:8477",
            "127.0.0.1.evil.example",
            "127.evil.example:8477",
            "localhost.evil:8477",
            "",
            "192.0.2.1:8477",
        ] {
            assert!(!host(bad), "{bad}");
        }
        assert!(!asked(Method::GET, false, false, &[]));
        assert!(asked(
            Method::GET,
            false,
            true,
            &[("host", "cache.example:8477")]
        ));
    }

    #[test]
    fn other_sites_are_refused() {
        let host = ("host", "localhost:8477");
        let api = |method, more: &[(&'static str, &str)]| {
            asked(method, true, false, &[&[host], more].concat())
        };
        assert!(api(
            Method::POST,
            &[
                ("origin", "http://localhost:8477"),
                ("sec-fetch-site", "same-origin")
            ]
        ));
        assert!(api(Method::GET, &[("sec-fetch-site", "none")]));
        for origin in [
            "http://evil.example",
            "https://localhost:8477",
            "http://localhost:8478",
            "http://localhost",
            "null",
        ] {
            assert!(!api(Method::POST, &[("origin", origin)]), "{origin}");
            assert!(!api(Method::GET, &[("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site", "nonsense"] {
            assert!(!api(Method::GET, &[("sec-fetch-site", site)]), "{site}");
            assert!(!api(Method::POST, &[("sec-fetch-site", site)]), "{site}");
        }
        assert!(!api(Method::GET, &[("upgrade", "websocket")]));
        // Somebody may follow a link to the page.
        let link = [host, ("sec-fetch-site", "cross-site")];
        assert!(asked(Method::GET, false, false, &link));
    }
}
