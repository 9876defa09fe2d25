//! The page itself: files that vite made of `console/`, inside the binary.
//!
//! Whoever builds without Node still gets a console that says what is missing, and not a build that fails.
//! Text is stored beside its gzip form, which nearly every browser takes: the page is there at once over a
//! thin line, and nothing is compressed while somebody waits.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rust_embed::{EmbeddedFile, RustEmbed};

use crate::pack::takes_gzip;

#[derive(RustEmbed)]
#[folder = "../../console/dist"]
#[allow_missing = true]
struct Built;

/// What is served where the page was not built.
const STUB: &str = include_str!("stub.html");

/// Files below this folder have a hash of their content in their name.
const HASHED: &str = "assets/";

/// True if the page is in this binary.
pub fn built() -> bool {
    Built::get("index.html").is_some()
}

/// The file of this path; `/` is the page.
pub(crate) fn serve(path: &str, asked: &HeaderMap) -> Response {
    let name = match path.trim_start_matches('/') {
        "" => "index.html",
        name => name,
    };
    if name == "index.html" && !built() {
        return page(STUB.into());
    }
    // What is embedded has no directories: a name that is not exactly one of its files is not there.
    let Some(file) = Built::get(name).filter(|_| !name.ends_with(".gz")) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let etag = format!("\"{}\"", hex(&file.metadata.sha256_hash()[..16]));
    let known = asked.get(header::IF_NONE_MATCH);
    if known.is_some_and(|known| known.as_bytes() == etag.as_bytes()) {
        return StatusCode::NOT_MODIFIED.into_response();
    }
    let packed = takes_gzip(asked)
        .then(|| Built::get(&format!("{name}.gz")))
        .flatten();
    let zipped = packed.is_some();
    let EmbeddedFile { data, .. } = packed.unwrap_or(file);
    let mut response = Response::new(Body::from(data.into_owned()));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind(name)));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        headers.insert(header::ETAG, etag);
    }
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if zipped {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    let keep = match name.starts_with(HASHED) {
        true => "public, max-age=31536000, immutable",
        false => "no-cache",
    };
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(keep));
    response
}

fn page(html: Body) -> Response {
    let mut response = Response::new(html);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/html; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn kind(name: &str) -> &'static str {
    match name.rsplit('.').next() {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("json") => "application/json",
        _ => "application/octet-stream",
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_climb_or_guess_find_nothing() {
        for path in [
            "/../Cargo.toml",
            "/assets/../../Cargo.toml",
            "/..%2fCargo.toml",
            "//etc/passwd",
            "/assets",
            "/assets/",
            "/index.html.gz",
            "/.",
            "/..",
            "/\0",
        ] {
            let status = serve(path, &HeaderMap::new()).status();
            assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[test]
    fn there_is_a_page_with_and_without_node() {
        let answer = serve("/", &HeaderMap::new());
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(
            answer.headers()[header::CONTENT_TYPE],
            "text/html; charset=utf-8"
        );
    }
}
