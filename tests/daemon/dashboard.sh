#!/usr/bin/env bash
# The page at /: what is served is the file, it asks nobody but its own daemon, and, if there is a
# Chromium, it shows what the daemon does, and the numbers that known looks at /stats make.
#
#   tests/daemon/dashboard.sh BIN_DIR [MODULE_DIR]
#
# MODULE_DIR: of a backend "hip" that says what its memory can give, 50 GB/s (planted.c).
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1 backend=cpu bandwidth=0
if [[ -n ${2-} ]]; then
  export ATTND_MODULE_DIR=$2
  backend=hip bandwidth=50000000000
fi
here=$(cd "$(dirname "$0")" && pwd)
html=$here/../../daemon/http/dashboard.html
grep -nE 'https?:|//[a-z]+\.|@import|url\(|src=' "$html" | grep -v 'http://www.w3.org/2000/svg' && die "the page asks others"

export ATTND_ENDPOINT=ipc://$dir/s
printf '[research]\nusers = %s\n' "$(id -u)" >"$dir/tenants"
chmod 600 "$dir/tenants"
start --backend $backend --listen "$ATTND_ENDPOINT" --listen.tenants "$dir/tenants" --listen.http 127.0.0.1:0
"$bin/attnctl" pool create '<b>shown</b>' --layers 1 --q-heads 2 --kv-heads 2 --head-dim 8 --blocks 9 >/dev/null
port=$(http_port)
page / >/dev/null
sed '1,/^\r$/d' "$dir/page" | cmp - "$html" || die "the page is not the file"
grep -q "^Content-Security-Policy: default-src 'none'" "$dir/page" || die "no policy"

# two sequences of ten tokens, behind 21 to 30 keys of 2 heads, 64 of k and of v, 2 bytes each
"$bin/attnload" --preset bytelm --sequences 2 --context 20 --steps 10 >/dev/null
page /stats >/dev/null
sed '1,/^\r$/d' "$dir/page" >"$dir/stats"
grep -qE "\"kv_read_bytes_total\": ?$((2 * 255 * 2 * (64 + 64) * 2))[,}]" "$dir/stats" || die "bytes read: $(cat "$dir/stats")"
grep -qE "\"device_memory_bytes_per_second\": ?${bandwidth}[,}]" "$dir/stats" || die "no bandwidth: $(cat "$dir/stats")"

chromium=$(command -v chromium || command -v chromium-browser || true)
[[ -n $chromium ]] || skip "no chromium to look at the page with"
browse() { # browse URL: the page as it is after eight of its seconds on a phone, in $dir/dom
  timeout 120 "$chromium" --headless=new --no-sandbox --disable-gpu --user-data-dir="$dir/profile" \
    --window-size=420,2000 \
    --virtual-time-budget=8000 --dump-dom "$1" >"$dir/dom" 2>/dev/null || die "the browser: $?"
}
shows() { # shows CARD TEXT...: each is in what the card says
  local id=$1 said text
  shift
  said=$(grep -oE "id=\"card-$id\".*" "$dir/dom" | sed 's#</section>.*##; s/<[^>]*>/ /g')
  for text in "$@"; do
    [[ " $said " == *" $text "* ]] || die "no \"$text\" in $id, which says: $said"
  done
}

"$bin/attnload" --preset bytelm --sequences 2 --context 20 --duration 600 >/dev/null 2>&1 &
beside=$!
for look in 1 2 3; do # a browser on a busy machine may have seen one answer only
  browse "http://127.0.0.1:$port/"
  grep -q 'id="card-steps"' "$dir/dom" && break
done
kill "$beside"
wait "$beside" || true
beside=
for text in '>serving<' '&lt;b&gt;shown&lt;/b&gt;' 'id="card-steps"' '<polyline points="[0-9]' 'id="card-total-ipc"' 'id="card-fill"' '<td>device</td>' '<td>research</td>'; do
  grep -qE -e "$text" "$dir/dom" || die "no $text in the page: $(head -c 3000 "$dir/dom")"
done
grep -q '<b>shown' "$dir/dom" && die "a pool's name is taken for HTML"
[[ $bandwidth == 0 ]] || shows share 'of 50 GB/s'
stop

# looks at known numbers: the daemon's last answer, and each second as much more
known() { # known BANDWIDTH: the page of a card with so much
  {
    sed '/^"use strict"/,$d' "$html"
    cat <<END
const last = $(cat "$dir/stats");
let n = 0;
window.fetch = async () => {
  n += 1;
  return {json: async () => ({...last, device_memory_bytes_per_second: $1,
    kv_read_bytes_total: 7e15 + 1.5e12 * n, device_seconds_total: 0.625 * n,
    steps_received_total: 12345 * n, step_tokens_total: 4096 * n,
    batches_total: 500 * n, batch_items_total: 16000 * n})};
};
performance.now = () => 1000 * n;
setTimeout(() => document.body.setAttribute("name-width",
  Math.min(...[...document.querySelectorAll("td:first-child")].map(e => e.clientWidth))), 6000);
</script>
<script>
END
    sed -n '/^"use strict"/,$p' "$html"
  } >"$dir/known.html"
  browse "file://$dir/known.html"
}
known 3.352e12
shows bandwidth '1.50 TB/s'
shows share '44.7 %' 'of 3.35 TB/s'
shows busy '62.5 %'
shows steps '12.3 k/s'
shows tokens '4.10 k/s'
shows batch '32'
width=$(grep -oE 'name-width="[0-9]+' "$dir/dom" | cut -d'"' -f2)
((width >= 80)) || die "names are $width pixels wide"
known 0 # of a card whose driver does not say it
shows bandwidth '1.50 TB/s'
grep -q 'id="card-share"' "$dir/dom" && die "a share of an unknown bandwidth: $(cat "$dir/dom")"
echo "the page shows what the daemon does"
